"""Loss, gradients and transcripts of encoder-decoder models, against each model's own in transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import soundfile as sf
import torch
import transformers as hf

from luthier.common.data.processing import Batch
from luthier.common.errors import BadExample, ModelError

FAMILIES = ("moonshine", "canary", "speech_to_text")


def waves(data: dict[str, Any]) -> list[Any]:
    return [sf.read(item.audio, dtype="float32")[0] for item in data["utterances"]]


def own(path: str, data: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """(summed loss, its gradients) by transformers: each recording alone, its text as labels."""
    model = hf.AutoModelForSpeechSeq2Seq.from_pretrained(path).eval()
    extractor, tokenizer = hf.AutoFeatureExtractor.from_pretrained(path), hf.AutoTokenizer.from_pretrained(path)
    total = 0.0
    for wave, utterance in zip(waves(data), data["utterances"], strict=True):
        inputs = extractor([wave], sampling_rate=16000, return_tensors="pt", return_attention_mask=True)
        labels = torch.tensor([[*tokenizer(utterance.text).input_ids, tokenizer.eos_token_id]])
        (model(**inputs, labels=labels).loss * labels.numel()).backward()
        total += float(model(**inputs, labels=labels).loss * labels.numel())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_a_padded_batch_are_those_of_each_recording_alone(make_task, model_of, collated, family):
    path = model_of(family)
    task = make_task(path)
    task.train_mode()
    data = collated(task.processing)
    assert len(set(data["lengths"].tolist())) == 4
    found = task.loss(data)
    found.sum.backward()
    expected, gradients = own(path, data)
    assert found.count == sum(len(utterance.text) + 1 for utterance in data["utterances"])
    assert float(found.sum) == pytest.approx(expected, rel=1e-5)
    compared = 0
    for name, gradient in gradients.items():
        if gradient.norm() < 1e-4:  # zero but for rounding, as the bias of attention's keys is
            continue
        assert relative(task.speech.get_parameter(name).grad, gradient) < 1e-3, name
        compared += 1
    assert compared > 25


@pytest.mark.parametrize("family", FAMILIES)
def test_transcripts_are_transformers_own(make_task, model_of, collated, family):
    path = model_of(family)
    task = make_task(path, evaluate={"max_new_tokens": 12}).eval()
    data = collated(task.processing)
    model, processor = hf.AutoModelForSpeechSeq2Seq.from_pretrained(path).eval(), hf.AutoProcessor.from_pretrained(path)
    expected = []
    for wave in waves(data):
        inputs = processor.feature_extractor([wave], sampling_rate=16000, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=12, decoder_input_ids=torch.tensor([[1]]), do_sample=False)
        expected.append(processor.tokenizer.decode(ids[0], skip_special_tokens=True).strip())
    records = task.predict(Batch(0, 0, (0, 1, 6, 7), data, 1.0, 1.0)).records
    assert [record.hypothesis for record in records] == expected
    # Untrained, Speech2Text ends at once; trained, see `test_what_is_saved_loads_in_transformers`.
    assert len(set(expected)) > 1 or family == "speech_to_text"
    assert [record.reference for record in records] == [utterance.text for utterance in data["utterances"]]


def test_label_smoothing_is_torch_s(make_task, model_of, collated):
    path = model_of("moonshine")
    task = make_task(path, task={"label_smoothing": 0.2}).eval()
    data = collated(task.processing, (0,))
    model = hf.AutoModelForSpeechSeq2Seq.from_pretrained(path).eval()
    logits = model(input_values=data["features"], decoder_input_ids=data["input_ids"]).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits, data["labels"][0], label_smoothing=0.2, reduction="sum")
    torch.testing.assert_close(task.loss(data).sum, wanted, rtol=1e-5, atol=0)


def test_control_tokens_are_read_and_carry_no_loss(make_processing, model_of, collated, examples):
    """By hand: `a` in English is <s> <|en|> a, of which `a` and the end are asked."""
    processing = make_processing(model_of("moonshine"), task={"prompt": ["<|{language}|>"]})
    data = collated(processing, (6, 1))
    word = processing.tokenizer.convert_tokens_to_ids
    assert data["prompts"].tolist() == [[1, word("<|en|>")], [1, word("<|it|>")]]
    assert data["input_ids"][0, :4].tolist() == [1, word("<|en|>"), word("a"), 2]
    assert data["labels"][0, :4].tolist() == [-100, word("a"), 2, -100]
    shown = processing.show(data, 0)
    assert shown.tokens == [("<s>", False), ("<|en|>", False), ("a", True), ("</s>", True)]
    example = examples(processing)[0]
    for language in ("xx", None):
        with pytest.raises(BadExample, match="no such control token"):
            processing.check(replace(example, language=language), False)


def test_a_piece_of_a_long_recording_has_no_part_in_the_loss(make_task, model_of, examples):
    task = make_task(model_of("canary"), evaluate={"max_new_tokens": 2}).eval()
    processing, example = task.processing, examples(task.processing)[7]
    piece = replace(example, text="", whole=example)
    items = [processing.encode(item, None) for item in (example, piece)]
    found, alone = (
        task.predict(Batch(0, 0, tuple(range(len(part))), processing.collate(part, None), 1.0, 1.0))
        for part in (items, items[:1])
    )
    assert len(found.records) == 2
    assert found.loss.count == alone.loss.count
    torch.testing.assert_close(found.loss.sum, alone.loss.sum, rtol=1e-5, atol=0)
    assert task.predict(Batch(0, 0, (0,), processing.collate(items[1:], None), 1.0, 1.0)).loss is None


def test_what_can_t_be_trained(make_processing, model_of, examples):
    processing = make_processing(model_of("moonshine"))
    example = examples(processing)[0]
    for text, reason in (("héllo", "unknown_tokens"), (" ", "no_tokens"), ("a" * 41, "text_too_long")):
        with pytest.raises(BadExample) as error:
            processing.check(replace(example, text=text), True)
        assert error.value.reason == reason
        processing.check(replace(example, text=text), False)
    processing.check(replace(example, text="a" * 39), True)  # with start: 40 positions
    with pytest.raises(BadExample, match="needs more audio"):
        processing.check(replace(example, duration=0.05), False)
    kept = make_processing(model_of("moonshine"), task={"unknown": "keep"})
    kept.check(replace(example, text="héllo"), True)
    assert kept.notes(replace(example, text="héllo")) == {"unknown tokens": 1}


def test_models_of_other_tasks_are_refused(make_recipe, make_task, tmp_path):
    hf.WhisperConfig(vocab_size=60, d_model=8).save_pretrained(tmp_path / "whisper")
    hf.BertConfig().save_pretrained(tmp_path / "bert")
    from luthier.modalities.asr.seq2seq.model import load_config

    with pytest.raises(ModelError, match=r"asr\.whisper"):
        load_config(str(tmp_path / "whisper"))
    with pytest.raises(ModelError, match="no encoder-decoder form"):
        load_config(str(tmp_path / "bert"))
