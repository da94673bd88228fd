"""Error rates: counts derived by hand, and jiwer's own on the whole corpus."""

from __future__ import annotations

import json
import random

import jiwer
import pytest

from luthier.common.errors import DataError
from luthier.modalities.asr.metrics import Scored, alignment, score
from luthier.modalities.asr.text import normalize


def corpus(size: int = 60) -> list[Scored]:
    """Italian with words lost, changed and added, punctuation, empty references and empty hypotheses."""
    draw = random.Random(0)
    vocabulary = ["Il", "gatto,", "nero", "perché", "dorme.", "sul", "tetto", "Roma", "è", "più"]
    items = []
    for number in range(size):
        said = draw.choices(vocabulary, k=draw.randint(0, 9))
        heard = [draw.choice(vocabulary) if draw.random() < 0.2 else word for word in said if draw.random() > 0.2]
        heard += draw.choices(vocabulary, k=draw.randint(0, 2))
        fields = {"source": draw.choice("ab")} if number % 5 else {}
        duration = draw.choice([None, 0.5, 2.0, 5.0, 15.0, 25.0, 40.0])
        items.append(Scored(" ".join(said), " ".join(heard), "it", f"x.jsonl:{number}", duration, fields))
    return items


def test_counts_derived_by_hand():
    result = score(
        [
            Scored("il gatto nero dorme", "il gatto dorme", "it"),  # 1 deletion
            Scored("la casa", "la cosa grande", "it"),  # 1 substitution, 1 insertion
        ]
    )
    assert (result["deletions"], result["substitutions"], result["insertions"]) == (1, 1, 1)
    assert (result["words"], result["utterances"]) == (6, 2)
    assert result["wer"] == result["wer_raw"] == 3 / 6
    # Characters: "nero " lost of 19; a -> o and " grande" added of 7.
    assert result["cer"] == result["cer_raw"] == (5 + 1 + 7) / (19 + 7)


def test_the_rate_is_of_the_corpus_not_a_mean_of_rates():
    result = score([Scored("a b c d e f g h i", "a b c d e f g h i", "it"), Scored("x", "y", "it")])
    assert result["wer"] == 1 / 10


def test_equals_jiwer_on_the_whole_corpus():
    items = corpus()
    said, heard = [item.reference for item in items], [item.hypothesis for item in items]
    normal_said, normal_heard = [normalize(text, "it") for text in said], [normalize(text, "it") for text in heard]
    result, expected = score(items), jiwer.process_words(normal_said, normal_heard)
    for name in ("insertions", "deletions", "substitutions", "wer"):
        assert result[name] == getattr(expected, name), name
    assert result["wer_raw"] == jiwer.wer(said, heard)
    assert result["cer"] == jiwer.cer(normal_said, normal_heard)
    assert result["cer_raw"] == jiwer.cer(said, heard)


def test_order_and_grouping_do_not_matter():
    items = corpus()
    shuffled = random.Random(1).sample(items, len(items))
    assert json.dumps(score(items)) == json.dumps(score(shuffled))
    alone = [score([item]) for item in items]
    for name in ("insertions", "deletions", "substitutions", "words", "empty_hypotheses", "empty_references"):
        assert score(items)[name] == sum(part[name] for part in alone), name


def test_slices_add_up_to_the_corpus():
    result = score(corpus(), slices=("language", "duration", "source", "speaker"))
    for name, values in result["slices"].items():
        assert sum(part["utterances"] for part in values.values()) == result["utterances"], name
        assert sum(part["words"] for part in values.values()) == result["words"], name
        errors = sum(part["wer"] * part["words"] for part in values.values())
        assert errors == pytest.approx(result["wer"] * result["words"]), name
    assert list(result["slices"]["duration"]) == ["<1 s", "1-3 s", "3-10 s", "10-20 s", "20-30 s", ">=30 s", "unknown"]
    assert list(result["slices"]["source"]) == ["a", "b", "unknown"]
    assert list(result["slices"]["speaker"]) == ["unknown"]


@pytest.mark.parametrize(
    ("seconds", "label"),
    [
        (0.0, "<1 s"),
        (1.0, "1-3 s"),
        (2.999, "1-3 s"),
        (3.0, "3-10 s"),
        (10.0, "10-20 s"),
        (20, "20-30 s"),
        (30, ">=30 s"),
    ],
)
def test_bins_of_duration(seconds, label):
    assert list(score([Scored("a", "a", duration=seconds)])["slices"]["duration"]) == [label]


def test_each_utterance_by_its_own_language():
    result = score(
        [Scored("I can't", "I can not", "en"), Scored("can't", "can not", "it"), Scored("我们", "我门", "zh")]
    )
    assert {name: part["wer"] for name, part in result["slices"]["language"].items()} == {
        "en": 0,
        "it": 1 / 2,
        "zh": 1 / 2,
    }


def test_case_and_punctuation_count_in_the_raw_rate_only():
    result = score([Scored("Ciao, Anna!", "ciao anna", "it")])
    assert result["wer"] == result["cer"] == 0
    assert result["wer_raw"] == 1.0


def test_chinese_is_scored_by_characters():
    result = score([Scored("我喜欢 猫。", "我喜 欢狗", "zh")])
    assert (result["words"], result["substitutions"], result["wer"], result["cer"]) == (4, 1, 1 / 4, 1 / 4)


def test_a_wrong_vowel_sign_is_an_error():
    result = score([Scored("हिन्दी भाषा", "हिन्दा भाषा", "hi")])
    assert (result["words"], result["substitutions"]) == (2, 1)
    assert result["cer"] == 1 / len("हिन्दी भाषा")


def test_an_empty_hypothesis_is_all_deletions():
    result = score([Scored("uno due tre", "", "it"), Scored("uno", "...", "it"), Scored("uno", "uno", "it")])
    assert (result["deletions"], result["words"], result["empty_hypotheses"]) == (4, 5, 2)
    assert result["wer"] == 4 / 5


def test_an_empty_reference_is_all_insertions():
    result = score(
        [Scored("", "uno due", "it"), Scored("", "", "it"), Scored("uno due tre quattro", "uno due tre quattro", "it")]
    )
    assert (result["insertions"], result["words"], result["empty_references"], result["empty_hypotheses"]) == (
        2,
        4,
        2,
        1,
    )
    assert result["wer"] == 2 / 4


def test_only_empty_references():
    assert score([Scored("", "uno due", "it")])["wer"] == 2
    assert score([Scored("", "", "it")])["wer"] == 0


def test_nothing_to_score_is_refused():
    with pytest.raises(DataError, match="no utterance"):
        score([])


def test_letters_outside_a_vocabulary_count():
    """A tokenizer that drops what it doesn't know makes "ello" of this reference; the rate is against the whole."""
    result = score([Scored("Hello, 5 你好!", "ello", "it")])
    assert (result["words"], result["substitutions"], result["deletions"]) == (3, 1, 2)


def test_spellings_reach_the_normaliser():
    items = [Scored("colour", "color", "en")]
    assert score(items)["wer"] == 1
    assert score(items, spelling={"colour": "color"})["wer"] == 0


def test_worst_first_and_only_what_is_wrong():
    items = [Scored("uno " * n, "due " * n, "it", f"x:{n}") for n in range(25)]
    worst = score(items)["worst"]
    assert [row["errors"] for row in worst] == list(range(24, 4, -1))
    assert worst[0] == {"where": "x:24", "reference": "uno " * 24, "hypothesis": "due " * 24, "wer": 1.0, "errors": 24}
    assert score([Scored("uno", "Uno!", "it")])["worst"] == []


def test_alignment():
    assert alignment("the cat sat", "the dog sat down") == "the [-cat-] {+dog+} sat {+down+}"
    assert alignment("我喜欢猫", "我欢猫", "zh") == "我 [-喜-] 欢猫"
    assert alignment("", "") == ""
