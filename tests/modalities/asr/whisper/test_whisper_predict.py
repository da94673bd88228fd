"""Whisper's transcripts. The reference is transformers' own `generate` with the same model and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.data.processing import Batch
from luthier.modalities.asr.utterance import Segment
from luthier.modalities.asr.whisper.model import encode

FITTED = (0, 1, 2, 3)
"""hello world (en), ciao bella (it), 你好 世界 (zh), good day (en)."""
PROMPT = "in short"
"""After it, the fitted model leaves out the second word."""


def fit(task: Any, batches: Sequence[dict[str, Any]], steps: int = 300) -> None:
    """Trains until the texts are all but certain: a mean loss below 0.02 nats a token, 10 times in a row."""
    torch.manual_seed(0)
    task.train_mode()
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], 5e-3, fused=True)
    good = 0
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss(batches[step % len(batches)])
        mean = loss.sum / loss.count
        mean.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        good = good + 1 if float(mean.detach()) < 0.02 else 0
        if good == 10:
            break
    assert good == 10, "the texts were not learned"
    task.eval()


@pytest.fixture(scope="session")
def fitted(make_task, examples, multilingual, tmp_path_factory) -> str:
    """A model that says the four texts, and with the prompt their first words."""
    task = make_task(multilingual)
    processing = task.processing
    plain = [examples(processing)[index] for index in FITTED]
    short = [replace(item, prompt=PROMPT, text=item.text.split()[0]) for item in plain]
    fit(task, [batch_of(processing, [*plain, *short])])
    folder = tmp_path_factory.mktemp("fitted")
    task.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def fitted_with_timestamps(make_task, examples, multilingual, tmp_path_factory) -> str:
    """A model that says the texts of two segments with their times."""
    task = make_task(multilingual, task={"timestamps": True})
    fit(task, [batch_of(task.processing, segmented(examples(task.processing)))])
    folder = tmp_path_factory.mktemp("fitted_with_timestamps")
    task.save_pretrained(folder)
    return str(folder)


def segmented(utterances: Sequence[Any]) -> list[Any]:
    """The fitted utterances, each word with times of its own."""
    found = []
    for number in FITTED:
        one, two = utterances[number].text.split()
        segments = (Segment(0.02 * number, 0.3, one), Segment(0.34, 0.5 + 0.04 * number, two))
        found.append(replace(utterances[number], segments=segments))
    return found


def batch_of(processing, utterances) -> dict[str, Any]:
    return processing.collate([processing.encode(item, None) for item in utterances], None)


def predicted(task, data):
    return task.predict(Batch(0, 0, tuple(range(len(data["utterances"]))), data, 1.0, 1.0))


def heard(task, data) -> list[str]:
    return [record.hypothesis for record in predicted(task, data).records]


def ids_of(task, data) -> list[list[int]]:
    """The token ids behind the transcripts, without padding."""
    with torch.no_grad():
        return [
            strip(task, task._generate(encode(task.whisper, row[None]), torch.tensor([prefix]))[0].tolist())
            for row, prefix in zip(data["features"], data["prefixes"], strict=True)
        ]


def strip(task, ids: list[int]) -> list[int]:
    end = task.processing.targets.end
    return ids[: ids.index(end)] if end in ids else ids


# ---------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("together", [True, False])
def test_transcripts_equal_generate(make_task, fitted, collated, together):
    """Token for token, rows of three languages in one batch or one by one."""
    task = make_task(fitted).eval()
    model = hf.WhisperForConditionalGeneration.from_pretrained(fitted)
    tokenizer = task.processing.processor.tokenizer
    for rows in [FITTED] if together else [[row] for row in FITTED]:
        data = collated(task.processing, rows)
        languages = [item.language for item in data["utterances"]]
        ids = model.generate(input_features=data["features"], language=languages, task="transcribe")
        with torch.no_grad():
            found = task._generate(task.encode(data), torch.tensor(data["prefixes"]))
        assert torch.equal(found[:, : ids.shape[1]], ids)
        assert (found[:, ids.shape[1] :] == task.processing.targets.end).all()
        assert heard(task, data) == tokenizer.batch_decode(ids, skip_special_tokens=True)
        assert heard(task, data) == [item.text for item in data["utterances"]]


def test_suppressed_tokens_equal_generate(make_task, fitted, collated):
    """The settings of the model count: some letters never, some not at the beginning."""
    task = make_task(fitted).eval()
    model = hf.WhisperForConditionalGeneration.from_pretrained(fitted)
    letters = task.processing.processor.tokenizer("loghc", add_special_tokens=False).input_ids
    data = collated(task.processing, FITTED)
    plain = heard(task, data)
    for config in (task.whisper.generation_config, model.generation_config):
        config.suppress_tokens = [*config.suppress_tokens, *letters[:2]]
        config.begin_suppress_tokens = [*config.begin_suppress_tokens, *letters[2:]]
    # Whisper's generate cuts at timestamps that come unasked and goes on from there; one call doesn't.
    ids = model.generate(
        input_features=data["features"],
        language=["en", "it", "zh", "en"],
        task="transcribe",
        max_new_tokens=30,
        force_unique_generate_call=True,
    )[:, 4:]
    suppressed = make_task(fitted, evaluate={"max_new_tokens": 30}).eval()
    suppressed.whisper.generation_config = task.whisper.generation_config
    found = ids_of(suppressed, data)
    assert found == [strip(task, row) for row in ids.tolist()]
    assert heard(suppressed, data) != plain
    assert all(row[0] not in letters and not {*letters[:2]} & {*row} for row in found)


def test_beams_equal_generate(make_task, fitted, collated):
    task = make_task(fitted, evaluate={"num_beams": 3}).eval()
    model = hf.WhisperForConditionalGeneration.from_pretrained(fitted)
    data = collated(task.processing, FITTED)
    ids = model.generate(
        input_features=data["features"], language=["en", "it", "zh", "en"], task="transcribe", num_beams=3
    )
    tokenizer = task.processing.processor.tokenizer
    assert heard(task, data) == tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert heard(task, data) == ["hello world", "ciao bella", "你好 世界", "good day"]


def test_beams_equal_generate_where_greedy_differs(make_task, multilingual, collated):
    """An untrained model, whose likeliest next token is seldom the beginning of the likeliest text."""
    model = hf.WhisperForConditionalGeneration.from_pretrained(multilingual)
    found = {}
    for beams in (1, 3):
        task = make_task(multilingual, evaluate={"num_beams": beams, "max_new_tokens": 12}).eval()
        data = collated(task.processing, (0, 3, 4))
        ids = model.generate(
            input_features=data["features"],
            language="en",
            task="transcribe",
            num_beams=beams,
            max_new_tokens=12,
            force_unique_generate_call=True,
        )[:, 4:]
        found[beams] = ids_of(task, data)
        assert found[beams] == [strip(task, row) for row in ids.tolist()]
    assert found[1] != found[3]


def test_at_most_so_many_tokens(make_task, fitted, collated):
    task = make_task(fitted, evaluate={"max_new_tokens": 5}).eval()
    assert heard(task, collated(task.processing, (0, 3))) == ["hello", "good"]
    # Never past the positions, however many are asked for.
    task = make_task(fitted, evaluate={"max_new_tokens": 500}).eval()
    data = collated(task.processing, (0,))
    task.whisper.generation_config.suppress_tokens = [task.processing.targets.end]
    assert [len(row) for row in ids_of(task, data)] == [64 - 4]


# ---------------------------------------------------------------------------------------------- mixed batches


def test_prompts_equal_generate(make_task, fitted, examples):
    task = make_task(fitted).eval()
    processing = task.processing
    model = hf.WhisperForConditionalGeneration.from_pretrained(fitted)
    items = [replace(examples(processing)[index], prompt=PROMPT) for index in FITTED]
    data = batch_of(processing, items)
    ids = model.generate(
        input_features=data["features"],
        language=[item.language for item in items],
        task="transcribe",
        prompt_ids=torch.tensor(processing.processor.tokenizer.get_prompt_ids(PROMPT)),
    )
    assert heard(task, data) == processing.processor.tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert heard(task, data) == ["hello", "ciao", "你好", "good"]


def test_rows_with_different_prompts_and_languages_in_one_batch(make_task, fitted, examples):
    """Each row is heard as it would be alone, whatever its prompt's length and its neighbours."""
    task = make_task(fitted).eval()
    items = examples(task.processing)
    mixed = [
        replace(items[0], prompt=PROMPT),
        items[1],
        replace(items[2], prompt="another prompt"),
        replace(items[3], prompt=PROMPT),
        items[0],
        replace(items[1], language="en"),
        replace(items[2], prompt="x"),
    ]
    data = batch_of(task.processing, mixed)
    assert len({len(prefix) for prefix in data["prefixes"]}) == 4
    together = heard(task, data)
    assert together == [heard(task, batch_of(task.processing, [item]))[0] for item in mixed]
    assert [together[row] for row in (0, 1, 3, 4)] == ["hello", "ciao bella", "good", "hello world"]


@pytest.mark.parametrize("context", ["full", "dynamic"])
def test_a_hypothesis_does_not_depend_on_its_batch(make_task, fitted, examples, context):
    """With a dynamic context it may, by the context that the batch's longest example asks for, and by that only."""
    task = make_task(fitted, evaluate={"audio_context": context, "max_new_tokens": 20}).eval()
    items = examples(task.processing)
    whole = batch_of(task.processing, items)
    expected = heard(task, whole)
    assert expected[:4] == ["hello world", "ciao bella", "你好 世界", "good day"] or context == "dynamic"
    for order in ((3, 0), (11, 2, 1), tuple(reversed(range(12)))):
        chosen = [items[index] for index in order]
        data = batch_of(task.processing, chosen)
        if context == "dynamic":
            frames = whole["features"].shape[2]
            data["features"] = whole["features"][list(order), :, :frames]
        assert heard(task, data) == [expected[index] for index in order]


def test_a_dynamic_context_hears_the_same_once_trained_for_it(make_task, multilingual, collated):
    """The point of `dynamic`: short contexts in training and evaluation, and the full one still works."""
    sections = {"model": {"audio_context": "dynamic", "context_margin": 0.1, "long_context_share": 0.5}}
    task = make_task(multilingual, evaluate={"audio_context": "dynamic"}, **sections)
    fit(task, [collated(task.processing, FITTED, np.random.default_rng(number)) for number in range(8)])
    texts = ["hello world", "ciao bella", "你好 世界", "good day"]
    short = collated(task.processing, FITTED)
    assert short["features"].shape[2] < 200
    assert heard(task, short) == texts
    full = make_task(multilingual).processing
    assert heard(task, collated(full, FITTED)) == texts


# ---------------------------------------------------------------------------------------------- timestamps


def test_timestamps_are_decoded_and_left_out_of_the_text(make_task, fitted_with_timestamps, examples):
    task = make_task(fitted_with_timestamps, task={"timestamps": True}).eval()
    model = hf.WhisperForConditionalGeneration.from_pretrained(fitted_with_timestamps)
    data = batch_of(task.processing, segmented(examples(task.processing)))
    ids = model.generate(
        input_features=data["features"],
        language=["en", "it", "zh", "en"],
        task="transcribe",
        return_timestamps=True,
        force_unique_generate_call=True,  # else it goes on after the last time, to the end of the 2 s
    )[:, 3:]
    found = ids_of(task, data)
    assert found == [strip(task, row) for row in ids.tolist()]
    decode = task.processing.processor.tokenizer.decode
    assert [decode(row, decode_with_timestamps=True) for row in found] == [
        "<|0.00|>hello<|0.30|><|0.34|> world<|0.50|>",
        "<|0.02|>ciao<|0.30|><|0.34|> bella<|0.54|>",
        "<|0.04|>你好<|0.30|><|0.34|> 世界<|0.58|>",
        "<|0.06|>good<|0.30|><|0.34|> day<|0.62|>",
    ]
    assert heard(task, data) == ["hello world", "ciao bella", "你好 世界", "good day"]


def test_times_in_order_even_where_the_model_would_not(make_task, multilingual, collated):
    """An untrained model under Whisper's rules: a time first, of 1 s at most; times never fall."""
    task = make_task(multilingual, task={"timestamps": True}, evaluate={"max_new_tokens": 40}).eval()
    data = collated(task.processing, range(6))
    names = task.processing.processor.tokenizer.convert_ids_to_tokens
    zero = task.processing.targets.no_timestamps + 1
    for row in ids_of(task, data):
        times = [token for token in row if token >= zero]
        assert row[0] == times[0] <= zero + 50
        assert times == sorted(times)
        assert "<|notimestamps|>" not in names(row)
    assert not any("<|" in text for text in heard(task, data))


# ---------------------------------------------------------------------------------------------- records


def test_records_and_loss(make_task, fitted, collated):
    task = make_task(fitted, evaluate={"slices": ["language", "speaker", "source"]}).eval()
    data = collated(task.processing, FITTED)
    result = predicted(task, data)
    assert [record.reference for record in result.records] == ["hello world", "ciao bella", "你好 世界", "good day"]
    assert [record.language for record in result.records] == ["en", "it", "zh", "en"]
    assert [record.duration for record in result.records] == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert [record.fields for record in result.records] == [{"speaker": name, "source": "rows"} for name in "abab"]
    assert [record.where.rpartition(":")[2] for record in result.records] == ["1", "2", "3", "4"]
    with torch.no_grad():
        expected = task.loss(data)
    assert torch.equal(result.loss.sum, expected.sum)
    metrics = task.score(result.records)
    assert {"wer", "wer_raw", "cer", "cer_raw"} <= metrics.keys() & task.metrics.keys()
    assert (metrics["wer"], metrics["cer"], metrics["utterances"]) == (0, 0, 4)
    assert metrics["slices"]["language"].keys() == {"en", "it", "zh"}
    assert [sample["hypothesis"] for sample in task.samples(result.records, 2)] == ["hello world", "你好 世界"]


def test_a_translation_is_scored_as_english(make_task, fitted, examples):
    """Its text is English, whatever was spoken; a Chinese row's words would count as letters."""
    task = make_task(fitted, task={"task": "translate"}).eval()
    item = replace(examples(task.processing)[2], text="hello world")
    (record,) = predicted(task, batch_of(task.processing, [item])).records
    assert record.language == "en"


def test_an_english_only_model_s_records_are_english(make_task, english, collated):
    task = make_task(english, evaluate={"max_new_tokens": 3}).eval()
    data = collated(task.processing, (0,))
    data["utterances"] = [replace(item, language=None) for item in data["utterances"]]
    assert [record.language for record in predicted(task, data).records] == ["en"]


def test_a_bfloat16_model_predicts(make_task, fitted, collated):
    task = make_task(fitted, train={"precision": "bf16-true"}).eval()
    assert heard(task, collated(task.processing, FITTED)) == ["hello world", "ciao bella", "你好 世界", "good day"]


def test_an_adapter_predicts(make_task, fitted, collated):
    """Fitted to other texts for the same sounds, the model says those: the adapter takes part in generation."""
    task = make_task(fitted, model={"lora": {"rank": 8, "target_modules": "all-linear"}})
    data = collated(task.processing, (0, 3))
    items = [
        replace(item, text=text) for item, text in zip(data["utterances"], ("good day", "hello world"), strict=True)
    ]
    swapped = batch_of(task.processing, items)
    assert heard(task.eval(), swapped) == ["hello world", "good day"]
    fit(task, [swapped])
    assert heard(task, swapped) == ["good day", "hello world"]


def test_times_of_a_transcript_are_compared_with_its_segments(make_task, fitted_with_timestamps, examples):
    """The model says the very times that it was fitted to: errors within half a step of 0.02 s."""
    task = make_task(fitted_with_timestamps, task={"timestamps": True}).eval()
    records = predicted(task, batch_of(task.processing, segmented(examples(task.processing)))).records
    assert [(time.text, round(time.start, 2), round(time.end, 2)) for time in records[0].times] == [
        ("hello", 0.0, 0.3),
        ("world", 0.34, 0.5),
    ]
    metrics = task.score(records)
    assert metrics["timed"] >= 12
    assert metrics["start_error"] <= 0.01 + 1e-9
    assert metrics["end_error"] <= 0.01 + 1e-9
