"""Greedy and beam search against all texts that there are; the language model against its file; hot words."""

from __future__ import annotations

import gzip
import itertools
import math
from itertools import groupby

import numpy as np
import pytest
import torch

from luthier.common.errors import ModelError, RecipeError
from luthier.modalities.asr.ctc.beam import BeamSearch
from luthier.modalities.asr.ctc.config import CtcEvaluate
from luthier.modalities.asr.ctc.decode import timed_words
from luthier.modalities.asr.ctc.ngram import NGram

# A bigram model whose numbers are log10; "ab" after "a" is seen, all else goes back to single words.
ARPA = """
\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-1.0\t<unk>
0\t<s>\t-0.5
-0.9\t</s>
-0.6\ta\t-0.25
-0.7\tab\t-0.125

\\2-grams:
-0.2\t<s> a
-0.3\ta ab
-0.4\tab </s>

\\end\\
"""


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    file = tmp_path_factory.mktemp("lm") / "words.arpa"
    file.write_text(ARPA)
    return str(file)


def test_the_language_model_is_its_file(lm, tmp_path):
    """Back-off by hand: a bigram that is there; else the weight of what precedes plus the word alone."""
    model = NGram(lm)
    assert model.order == 2
    cases = {
        (("<s>",), "a"): -0.2,
        (("a",), "ab"): -0.3,
        (("ab",), "a"): -0.125 - 0.6,
        (("<s>",), "ab"): -0.5 - 0.7,
        (("a",), "zebra"): -0.25 - 1.0,
        (("<unk>",), "a"): -0.6,
        (("a",), "</s>"): -0.25 - 0.9,
    }
    for (history, word), expected in cases.items():
        score, after = model.score(history, word)
        assert score == pytest.approx(expected * math.log(10)), (history, word)
        assert after == (("<unk>",) if word == "zebra" else (word,))
    with gzip.open(tmp_path / "words.arpa.gz", "wt") as file:
        file.write(ARPA)
    assert NGram(str(tmp_path / "words.arpa.gz")).score(("a",), "ab") == model.score(("a",), "ab")


@pytest.mark.parametrize("broken", ["", "hello\n", ARPA.replace("\\end\\", ""), ARPA.replace("-0.7", "x")])
def test_a_broken_language_model_is_refused(tmp_path, broken):
    (tmp_path / "x.arpa").write_text(broken)
    with pytest.raises(ModelError, match=r"evaluate\.lm"):
        NGram(str(tmp_path / "x.arpa"))


def test_hot_words_without_a_beam_are_refused(make_recipe, wav2vec2):
    with pytest.raises(RecipeError, match="num_beams"):
        make_recipe(wav2vec2, evaluate={"hotwords": ["ciao"]})


# ---------------------------------------------------------------------------------------------- search

TINY = ["<pad>", "<unk>", "|", "a", "b"]


@pytest.fixture(scope="module")
def labels(make_processing, model_of):
    return make_processing(model_of("wav2vec2:group", TINY), data={"max_bad": 1}).labels


def all_texts(scores: np.ndarray) -> dict[tuple[int, ...], float]:
    """Log-probability of every label sequence, summed over every path."""
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(scores.shape[1]), repeat=len(scores)):
        text = tuple(label for label, _ in groupby(path) if label != 0)
        value = float(sum(scores[at, label] for at, label in enumerate(path)))
        found[text] = float(np.logaddexp(found.get(text, -math.inf), value))
    return found


def earned(text, model, section) -> float:
    """What language model and hot words add to a text."""
    spelled = "".join({1: "<unk>", 2: " ", 3: "a", 4: "b"}[label] for label in text).split()
    total = sum(section.hotword_weight for word in spelled if word in section.hotwords)
    if model is None:
        return total
    history = ("<s>",)
    for word in spelled:
        score, history = model.score(history, word)
        total += section.lm_weight * score + section.word_bonus
    return total + section.lm_weight * model.score(history, "</s>")[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_lm", [False, True])
@pytest.mark.parametrize("hotwords", [(), ("ab",)])
def test_a_wide_beam_finds_the_best_of_all_texts(labels, lm, seed, with_lm, hotwords):
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)).mul(1.5).log_softmax(-1).numpy()
    section = CtcEvaluate(
        num_beams=4000, lm=lm if with_lm else None, lm_weight=0.7, word_bonus=0.4, hotwords=hotwords, hotword_weight=1.2
    )
    model = NGram(lm) if with_lm else None
    texts = {text: value + earned(text, model, section) for text, value in all_texts(scores).items()}
    best = max(texts, key=lambda text: texts[text])
    assert BeamSearch(labels, 5, section).search(scores).labels == list(best)


def test_the_texts_of_a_search_keep_doubled_letters(labels):
    """aa needs a blank between; joined labels alone would be read as one."""
    scores = torch.full((3, 5), -9.0)
    for frame, label in enumerate((3, 0, 3)):
        scores[frame, label] = 0.0
    assert BeamSearch(labels, 5, CtcEvaluate(num_beams=5))(scores.log_softmax(-1).numpy()) == "aa"


def test_hot_words_win_close_calls_only(labels):
    """Frames that say "a" with 60 % and "b" with 40 %: log(0.6 / 0.4) = 0.41."""
    scores = torch.log(torch.tensor([[1e-4, 1e-4, 1e-4, 0.6, 0.4]])).numpy()
    text = {}
    for weight in (0.2, 0.6):
        section = CtcEvaluate(num_beams=5, hotwords=("b",), hotword_weight=weight)
        text[weight] = BeamSearch(labels, 5, section)(scores)
    assert text == {0.2: "a", 0.6: "b"}


def test_an_empty_recording_gives_an_empty_text(labels):
    scores = torch.tensor([[0.0, -20, -20, -20, -20]] * 4).log_softmax(-1).numpy()
    assert BeamSearch(labels, 5, CtcEvaluate(num_beams=3))(scores) == ""
    assert labels.decode([0, 0, 0]) == ""


def test_words_and_their_times(labels):
    """Frames:      0  1  2  3  4  5  6  7  8  9 : " ab  b|aa a" in pieces of 20 ms."""
    ids = [0, 3, 4, 4, 0, 4, 2, 3, 3, 0, 3, 0]
    found = timed_words(ids, labels, 0.02, "en")
    assert [(word.text, round(word.start, 2), round(word.end, 2)) for word in found] == [
        ("abb", 0.02, 0.12),
        ("aa", 0.14, 0.22),
    ]
    single = timed_words(ids, labels, 0.02, "zh")
    assert [word.text for word in single] == ["a", "b", "b", "a", "a"]
    assert single[1].start == pytest.approx(0.04)
    assert single[1].end == pytest.approx(0.08)
    assert labels.decode(ids) == "abb aa"


def test_a_task_searches(make_task, model_of, collated, lm):
    from luthier.common.data.processing import Batch

    task = make_task(model_of("wav2vec2:group"), evaluate={"num_beams": 4, "hotwords": ["ciao"], "lm": lm}).eval()
    data = collated(task.processing)
    found = task.predict(Batch(0, 0, (0, 1, 2, 3), data, 1.0, 1.0))
    with torch.no_grad():
        logits, frames = task.heard(data)
    for row, count, record in zip(logits, frames.tolist(), found.records, strict=True):
        scores = row[:count].log_softmax(-1).numpy()
        assert record.hypothesis == BeamSearch(task.processing.labels, 32, task.recipe.evaluate)(scores)
