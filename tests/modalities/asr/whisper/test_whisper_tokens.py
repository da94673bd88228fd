"""What Whisper's decoder reads and is asked to say. Expected layouts come from transformers' own tokenizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf

from luthier.common.data.collect import collect
from luthier.common.errors import BadExample, ModelError
from luthier.modalities.asr.utterance import Segment, Utterance

END = "<|endoftext|>"
START = "<|startoftranscript|>"


def said(text: str = "hi", **fields) -> Utterance:
    return Utterance(audio="", text=text, where="rows.jsonl:1", **{"language": "en", "duration": 1.0} | fields)


def names(processing, ids) -> list[str]:
    return processing.processor.tokenizer.convert_ids_to_tokens(list(ids))


def tokens(text: str) -> list[str]:
    """The tokens of a text of printable ASCII in a vocabulary of bytes."""
    return [letter.replace(" ", "Ġ") for letter in text]


# ---------------------------------------------------------------------------------------------- layout


def test_layout_of_a_multilingual_target(make_processing, multilingual):
    processing = make_processing(multilingual)
    target = processing.targets.target(said("hi all", language="it"))
    control = [START, "<|it|>", "<|transcribe|>", "<|notimestamps|>"]
    assert names(processing, target.inputs) == [*control, *tokens("hi all")]
    assert -100 not in target.labels
    assert names(processing, target.labels) == [*control[1:], *tokens("hi all"), END]


@pytest.mark.parametrize(("language", "text"), [("english", "good day"), ("it", "perché no"), ("zh", "你好 世界")])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("timestamps", [False, True])
def test_multilingual_layout_equals_transformers(make_processing, all_languages, language, text, task, timestamps):
    processing = make_processing(all_languages, task={"task": task, "timestamps": timestamps})
    tokenizer = hf.WhisperTokenizer.from_pretrained(all_languages)
    tokenizer.set_prefix_tokens(language=language, task=task, predict_timestamps=timestamps)
    target = processing.targets.target(said(text, language=language))
    whole = f"<|0.00|>{text}<|1.00|>" if timestamps else text
    expected = tokenizer(whole).input_ids
    # transformers' model puts the start token before the labels itself, and reads all but the last.
    assert target.labels == expected[1:]
    assert target.inputs == expected[:-1]
    assert target.control == tuple(tokenizer.prefix_tokens)


@pytest.mark.parametrize("language", [None, "it"])
def test_english_only_layout_equals_transformers(make_processing, english, language):
    processing = make_processing(english)
    expected = hf.WhisperTokenizer.from_pretrained(english)("hello world").input_ids
    target = processing.targets.target(said("hello world", language=language))
    assert names(processing, expected) == [START, "<|notimestamps|>", *tokens("hello world"), END]
    assert target.labels == expected[1:]
    assert target.inputs == expected[:-1]


@pytest.mark.parametrize("timestamps", [False, True])
def test_one_start_and_one_end_in_each_row_of_a_batch(make_processing, multilingual, collated, timestamps):
    processing = make_processing(multilingual, task={"timestamps": timestamps})
    targets = processing.targets
    assert processing.processor.tokenizer.pad_token_id == targets.end
    batch = collated(processing, range(12))
    lengths = [len(targets.target(item).inputs) for item in batch["utterances"]]
    assert len(set(lengths)) > 1
    for inputs, labels, length in zip(batch["input_ids"], batch["labels"], lengths, strict=True):
        assert (inputs == targets.start).sum() == 1
        assert inputs[0] == targets.start
        assert targets.start not in labels
        assert (labels == targets.end).sum() == 1
        assert labels[length - 1] == targets.end
        assert (labels[length:] == -100).all()
        assert (inputs[length:] == targets.end).all()
        # A label is what the decoder reads next.
        assert torch.equal(labels[: length - 1], inputs[1:length])
    assert batch["prefixes"] == [targets.control(item) for item in batch["utterances"]]


# ---------------------------------------------------------------------------------------------- language


@pytest.mark.parametrize("language", ["it", "italian", "Italian", "IT", "it-IT", "it_CH", " it "])
def test_language_by_name_code_and_region(make_processing, multilingual, language):
    processing = make_processing(multilingual, task={"language": language})
    assert names(processing, processing.targets.control(said(language=None)))[1] == "<|it|>"
    processing = make_processing(multilingual)
    assert names(processing, processing.targets.control(said(language=language)))[1] == "<|it|>"


@pytest.mark.parametrize(("language", "token"), [("mandarin", "<|zh|>"), ("zh-TW", "<|zh|>"), ("EN-us", "<|en|>")])
def test_other_spellings_of_a_language(make_processing, multilingual, language, token):
    processing = make_processing(multilingual)
    assert names(processing, processing.targets.control(said(language=language)))[1] == token


def test_language_goes_by_name_and_not_by_place(make_processing, multilingual):
    """transformers counts from the start token, which in this vocabulary leads from `it` to some other token."""
    processing = make_processing(multilingual)
    tokenizer = hf.WhisperTokenizer.from_pretrained(multilingual)
    tokenizer.set_prefix_tokens(language="it", task="transcribe")
    assert "<|it|>" not in names(processing, tokenizer.prefix_tokens)
    assert names(processing, processing.targets.control(said(language="it")))[1] == "<|it|>"


def test_a_row_language_goes_before_the_recipe_s(make_processing, multilingual):
    targets = make_processing(multilingual, task={"language": "it"}).targets
    assert targets.language(said(language="zh")) == "zh"
    assert targets.language(said(language=None)) == "it"


@pytest.mark.parametrize("language", ["klingon", "fr", "yue", "xx-XX"])
def test_unknown_language_is_refused(make_processing, multilingual, language):
    with pytest.raises(BadExample, match="language") as caught:
        make_processing(multilingual).targets.target(said(language=language))
    assert caught.value.reason == "unknown_language"
    assert caught.value.where == "rows.jsonl:1"
    assert language in str(caught.value)
    with pytest.raises(ModelError, match=r"task\.language"):
        make_processing(multilingual, task={"language": language})


def test_a_multilingual_model_needs_a_language(make_processing, multilingual):
    with pytest.raises(BadExample, match=r"task\.language") as caught:
        make_processing(multilingual).targets.target(said(language=None))
    assert caught.value.reason == "no_language"


def test_an_english_only_model_can_t_translate(make_processing, english):
    with pytest.raises(ModelError, match="translate"):
        make_processing(english, task={"task": "translate"})


# ---------------------------------------------------------------------------------------------- text


def test_text_longer_than_the_positions(make_processing, english):
    """64 positions: start, no-timestamps, text; the end token is only said."""
    targets = make_processing(english).targets
    assert len(targets.target(said("a" * 62)).inputs) == 64
    with pytest.raises(BadExample, match="at most 64") as caught:
        targets.target(said("a" * 63))
    assert caught.value.reason == "text_too_long"


def test_too_long_text_is_counted_before_training(make_processing, english, manifest, tmp_path):
    rows = [line for line in manifest.read_text(encoding="utf-8").splitlines() if "grazie" not in line]
    rows[0] = rows[0].replace("hello world", "hello world " * 10)
    folder = manifest.parent
    (folder / "long.jsonl").write_text("\n".join(rows), encoding="utf-8")
    processing = make_processing(english, data={"train": str(folder / "long.jsonl"), "max_bad": 0.5})
    report = collect(processing.recipe.data.train, processing, processing.recipe.data).report
    assert dict(report.dropped) == {"text_too_long": 1}
    assert (report.rows, report.kept_rows) == (11, 10)
    assert "long.jsonl:1" in report.named["text_too_long"][0]


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("field", ["text", "prompt", "segments"])
def test_text_that_the_vocabulary_can_t_write(make_processing, without_q, timestamps, field):
    if field == "segments" and not timestamps:
        pytest.skip("segments are written with timestamps only")
    processing = make_processing(without_q, task={"timestamps": timestamps})
    good = said("be uiet", prompt="uite", segments=(Segment(0, 1, "be uiet"),))
    processing.targets.target(good)
    bad = {"text": "be quiet", "prompt": "quite", "segments": (Segment(0, 1, "be quiet"),)}[field]
    utterance = replace(good, **{field: bad, **({"segments": ()} if field == "text" else {})})
    with pytest.raises(BadExample, match=r"quiet|quite") as caught:
        processing.targets.target(utterance)
    assert caught.value.reason == "text_not_in_vocabulary"


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("text", ["so <|endoftext|> it ends", "<|en|>hello", "at <|0.50|> it began"])
def test_control_tokens_spelled_in_a_transcript_are_refused(make_processing, multilingual, timestamps, text):
    targets = make_processing(multilingual, task={"timestamps": timestamps}).targets
    with pytest.raises(BadExample, match=r"rows\.jsonl:1"):
        targets.target(said(text))
    with pytest.raises(BadExample, match=r"rows\.jsonl:1"):
        targets.target(said("fine", prompt=text))


@pytest.mark.parametrize(
    "text", ["ça va ?", "a  b", "do n't", " spaced ", "été", "e\u0301te\u0301", "one , two .", "😀"]
)
def test_spelling_is_kept(make_processing, multilingual, text):
    """No clean-up of spaces, no normalisation: what is trained is what is written."""
    processing = make_processing(multilingual)
    target = processing.targets.target(said(text))
    tokenizer = processing.processor.tokenizer
    assert tokenizer.decode(target.text[:-1], clean_up_tokenization_spaces=False).strip() == text.strip()


def test_a_tokenizer_that_cleans_up_spaces_loses_no_text(make_processing, multilingual):
    """Published tokenizers ask for this clean-up; transformers 5.24 ignores it, other releases don't."""
    processing = make_processing(multilingual)
    tokenizer = processing.processor.tokenizer
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tokenizer.decode(tokenizer("ça va ?", add_special_tokens=False).input_ids) == "ça va?"
    processing.targets.target(said("ça va ?"))


# ---------------------------------------------------------------------------------------------- prompt


def test_a_prompt_is_read_and_not_asked(make_processing, multilingual):
    processing = make_processing(multilingual)
    target = processing.targets.target(said("hi", prompt=" before "))
    # As transformers makes prompts for generate(prompt_ids=...).
    expected = hf.WhisperTokenizer.from_pretrained(multilingual).get_prompt_ids(" before ").tolist()
    assert list(target.prompt) == expected
    assert names(processing, expected) == ["<|startofprev|>", *tokens(" before")]
    plain = processing.targets.target(said("hi"))
    assert target.inputs == expected + plain.inputs
    assert target.labels == [-100] * len(expected) + plain.labels


def test_a_long_prompt_keeps_its_end(make_processing, multilingual):
    """Whisper keeps half of the positions for the prompt with its start token: 32 of 64."""
    processing = make_processing(multilingual)
    target = processing.targets.target(said("hi", prompt="x" * 50 + "the end"))
    assert len(target.prompt) == 32
    assert names(processing, target.prompt) == ["<|startofprev|>", *tokens("x" * 24 + "the end")]


@pytest.mark.parametrize("prompt", [None, ""])
def test_no_prompt(make_processing, multilingual, prompt):
    assert make_processing(multilingual).targets.target(said(prompt=prompt)).prompt == ()


# ---------------------------------------------------------------------------------------------- timestamps


@pytest.fixture
def timed(make_processing, multilingual):
    return make_processing(multilingual, task={"timestamps": True})


def text_of(processing, target) -> str:
    return "".join(names(processing, target.text)).replace("Ġ", " ")


def test_timestamps_around_the_whole_text(timed):
    target = timed.targets.target(said("hi", duration=1.234))
    assert names(timed, target.control) == [START, "<|en|>", "<|transcribe|>"]
    assert text_of(timed, target) == f"<|0.00|>hi<|1.24|>{END}"  # to the nearest 0.02 s


def test_timestamps_of_segments(timed):
    segments = (Segment(0.1, 0.5, "hello"), Segment(0.61, 1.0, "world"))
    target = timed.targets.target(said("hello world", segments=segments))
    assert text_of(timed, target) == f"<|0.10|>hello<|0.50|><|0.60|> world<|1.00|>{END}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hello world", ["hello", "world"]),
        ("hello world", ["hello", " world"]),
        ("hello world", ["hello ", "world"]),
        ("hello world", ["hello ", " world"]),
        ("你好世界", ["你好", "世界"]),
    ],
)
def test_without_its_timestamps_a_segmented_text_is_the_text(timed, text, parts):
    """However the rows give the spaces between segments; the score compares with the whole text."""
    segments = tuple(Segment(n * 0.5, n * 0.5 + 0.4, part) for n, part in enumerate(parts))
    target = timed.targets.target(said(text, segments=segments))
    assert timed.processor.tokenizer.decode(target.text, skip_special_tokens=True) == text


def test_timestamps_are_stretched_with_the_audio(timed):
    segments = (Segment(0.0, 0.4, "a"), Segment(0.5, 1.0, "b"))
    target = timed.targets.target(said("a b", segments=segments), 1 / 0.8)
    # 0.5, 0.625 and 1.25 s are 25, 31.25 and 62.5 steps of 0.02 s; a tie goes to the even step.
    assert text_of(timed, target) == f"<|0.00|>a<|0.50|><|0.62|> b<|1.24|>{END}"


def test_a_segment_that_ends_a_little_after_the_audio_ends_with_it(timed):
    """The checks allow 0.1 s; at the full length there is no token for such a time."""
    target = timed.targets.target(said("a", duration=2.0, segments=(Segment(0.0, 2.06, "a"),)))
    assert text_of(timed, target) == f"<|0.00|>a<|2.00|>{END}"
    target = timed.targets.target(said("a", duration=1.6, segments=(Segment(0.0, 1.68, "a"),)), 1.25)
    assert text_of(timed, target) == f"<|0.00|>a<|2.00|>{END}"


def test_timestamps_need_their_tokens(make_processing, all_languages, tmp_path):
    import shutil

    folder = tmp_path / "old"
    shutil.copytree(all_languages, folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace("<|0.00|>", "<|nought|>"), encoding="utf-8")
    make_processing(str(folder))
    with pytest.raises(ModelError, match=r"<\|0\.00\|>"):
        make_processing(str(folder), task={"timestamps": True})
