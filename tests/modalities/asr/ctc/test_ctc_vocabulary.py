"""Spelling, vocabularies and the rows of the output layer that go with them."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch
import transformers as hf

from luthier.common.data.collect import collect
from luthier.common.errors import BadExample, ModelError
from luthier.modalities.asr.ctc.config import CtcTask, SpellingSection
from luthier.modalities.asr.ctc.spelling import characters, spell
from luthier.modalities.asr.ctc.vocabulary import load_tokenizer

SOUNDS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "Don't -- she said: “e\u0301” is 5 €!".replace("e\u0301", "é")),
        ({"case": "lower"}, "don't -- she said: “é” is 5 €!"),
        ({"case": "upper", "punctuation": "remove"}, "DON'T SHE SAID É IS 5"),
        ({"replace": {"€": "euro", "5 euro": "five euro"}, "punctuation": "remove"}, "Don't she said é is five euro"),
    ],
)
def test_spelling(settings, expected):
    text = " Don't  -- she said: “e\u0301” is\n5 €! "
    assert spell(text, SpellingSection(**settings)) == expected


def test_apostrophes_and_hyphens_stay_inside_words_only():
    section = SpellingSection(punctuation="remove")
    assert spell("'tis l’amour - well-known 'quoted' rock'n'roll dogs'", section) == (
        "tis l’amour well-known quoted rock'n'roll dogs"
    )


def test_characters_are_counted_after_spelling():
    section = CtcTask(kind="asr.ctc", spelling=SpellingSection(case="lower"), min_count=2)
    assert characters(["Aab", "b c", "é"], section) == ["a", "b"]
    assert characters(["Aab", "b c", "é"], section.model_copy(update={"min_count": 1})) == ["a", "b", "c", "é"]


# ---------------------------------------------------------------------------------------------- unknown characters


def report_of(make_processing, path, data, **task):
    processing = make_processing(path, data={"train": data, "max_bad": 0.9}, task=task)
    return processing, collect(processing.recipe.data.train, processing, processing.recipe.data).report


def test_characters_outside_of_the_vocabulary_are_refused_and_named(make_processing, wav2vec2, changed):
    """Fault 13: "Hello, 5 你好!" must not become "ello"."""
    data = changed("unknown", "Hello, 5 你好!", "ciao bella", "a|b")
    _, report = report_of(make_processing, wav2vec2, data)
    assert dict(report.dropped) == {"text_not_in_vocabulary": 2}
    first, second = report.named["text_not_in_vocabulary"]
    for char in "H,5你好!":
        assert repr(char) in first
    assert "unknown.jsonl:1" in first
    assert "'|'" in second  # it would be written as a space
    assert report.kept_rows == 1


@pytest.mark.parametrize(("policy", "written"), [("drop", "ello  5"), ("token", "<unk>ello<unk> 5")])
def test_unknown_characters_are_counted(make_processing, model_of, changed, policy, written):
    path = model_of("wav2vec2:group", [*SOUNDS, "5"])
    processing, report = report_of(make_processing, path, changed("count", "Hello, 5", "xxé"), unknown=policy)
    assert report.noted == {
        "'H' not in the vocabulary": 1,
        "',' not in the vocabulary": 1,
        "'é' not in the vocabulary": 1,
    }
    ids = processing.labels.ids("Hello, 5", "x:1")
    tokens = processing.vocabulary.tokens
    assert "".join(tokens[label] for label in ids).replace("|", " ") == " ".join(written.split())
    # The reference stays as it is.
    item = collect(processing.recipe.data.train, processing, processing.recipe.data).examples[0]
    assert item.text == "Hello, 5"


def test_a_text_of_which_nothing_is_left_is_refused(make_processing, wav2vec2):
    processing = make_processing(wav2vec2, task={"unknown": "drop"})
    with pytest.raises(BadExample) as caught:
        processing.labels.ids("你好!", "x:1")
    assert caught.value.reason == "empty_text"
    literal = make_processing(wav2vec2, task={"unknown": "token"})
    with pytest.raises(BadExample) as caught:
        literal.labels.ids("say <pad>", "x:1")
    assert caught.value.reason == "control_token"


def test_the_data_path_goes_to_worker_processes(make_processing, wav2vec2):
    processing = pickle.loads(pickle.dumps(make_processing(wav2vec2)))
    assert processing.labels.unknown("Ab") == Counter("A")
    assert processing.hearing.frames(16000) == make_processing(wav2vec2).hearing.frames(16000)


# ---------------------------------------------------------------------------------------------- vocabularies


def rows(task) -> dict[str, torch.Tensor]:
    """Weights and bias of each token of the output layer."""
    name = "lm_head" if hasattr(task.speech, "lm_head") else "ctc_head"
    head = getattr(task.speech, name)
    weight = head.weight.detach().flatten(1)
    return {
        token: torch.cat([weight[at], head.bias.detach()[at, None]])
        for at, token in enumerate(task.processing.vocabulary.tokens)
        if token
    }


@pytest.mark.parametrize("family", ["wav2vec2:group", "parakeet_ctc"])
def test_an_extended_vocabulary_keeps_the_old_rows(make_task, model_of, changed, family):
    """Fault 15, and asked for elsewhere: growing a vocabulary leaves what was learned as it is."""
    path = model_of(family)
    data = {"train": changed("extend", "ciao è là", "9 città", "x|y")}
    plain, grown = make_task(path), make_task(path, data=data, task={"vocabulary": "extend"})
    before, after = rows(plain), rows(grown)
    assert list(after) == [*before, "9", "à", "è"]
    for token, row in before.items():
        assert torch.equal(after[token], row), token
    assert grown.speech.config.vocab_size == len(after)
    assert all(after[token][-1] == 0 and 0 < after[token][:-1].abs().max() < 1.5 for token in "9àè")
    same = make_task(path, task={"vocabulary": "extend"})  # nothing is lacking
    assert same.processing.vocabulary.rows is None


def test_a_new_vocabulary_keeps_the_rows_of_shared_tokens(make_task, model_of, changed):
    path = model_of("wav2vec2:group")
    data = {"train": changed("new", "ciao è", "aab")}
    before, after = rows(make_task(path)), rows(make_task(path, data=data, task={"vocabulary": "new"}))
    assert list(after) == ["<pad>", "<unk>", "|", *"abcio", "è"]
    for token in ("<pad>", "<unk>", "|", *"abcio"):
        assert torch.equal(after[token], before[token]), token


def test_special_tokens_of_other_names_keep_their_rows(make_task, tmp_path, changed):
    """HF's own examples write [PAD] and [UNK]."""
    import json

    config = hf.Wav2Vec2Config(
        vocab_size=4,
        pad_token_id=3,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    hf.Wav2Vec2ForCTC(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"|": 0, "a": 1, "[UNK]": 2, "[PAD]": 3}))
    spoken = hf.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"), unk_token="[UNK]", pad_token="[PAD]")
    hf.Wav2Vec2Processor(hf.Wav2Vec2FeatureExtractor(), spoken).save_pretrained(tmp_path)
    data = {"train": changed("special", "aab")}
    old = hf.Wav2Vec2ForCTC.from_pretrained(tmp_path).lm_head.weight
    task = make_task(str(tmp_path), data=data, task={"vocabulary": "new"})
    weight = task.speech.lm_head.weight.detach()
    assert task.processing.vocabulary.tokens == ["<pad>", "<unk>", "|", "a", "b"]
    assert torch.equal(weight[:4], old[[3, 2, 0, 1]])
    extended = make_task(str(tmp_path), data=data, task={"vocabulary": "extend"})
    assert extended.processing.labels.blank == 3
    assert torch.equal(extended.speech.lm_head.weight[:4], old)


def test_a_model_that_was_only_pretrained_needs_a_new_vocabulary(make_task, tmp_path, changed, wav2vec2):
    """As wav2vec2-base is: no tokenizer and no output layer."""
    base = hf.Wav2Vec2ForCTC.from_pretrained(wav2vec2).wav2vec2
    base.save_pretrained(tmp_path)
    hf.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), None) is None
    with pytest.raises(ModelError, match=r"task\.vocabulary: new"):
        make_task(str(tmp_path))
    task = make_task(str(tmp_path), task={"vocabulary": "new"}, data={"train": changed("fresh", "ab")})
    assert task.processing.vocabulary.tokens == ["<pad>", "<unk>", "|", "a", "b"]
    assert task.speech.lm_head.out_features == 5
    found = task.speech.wav2vec2.encoder.layers[0].attention.q_proj.weight
    assert torch.equal(found, base.encoder.layers[0].attention.q_proj.weight)


def test_what_cannot_be_extended_is_refused(make_task, model_of, tmp_path, changed):
    import shutil

    from tokenizers import Tokenizer, models

    shutil.copytree(model_of("parakeet_ctc"), tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    (tmp_path / "vocab.json").unlink()
    pieces = Tokenizer(models.BPE(vocab={"<pad>": 0, "<unk>": 1, "a": 2}, merges=[], unk_token="<unk>"))
    hf.ParakeetTokenizer(tokenizer_object=pieces, pad_token="<pad>", unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"task\.vocabulary"):
        make_task(str(tmp_path), task={"vocabulary": "extend"}, data={"train": changed("pieces", "ab")})
