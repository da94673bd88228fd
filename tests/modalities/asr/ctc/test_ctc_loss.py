"""Loss and gradients of the CTC task, against each model's own in transformers, and their independence of the batch."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

FAMILIES = (
    "wav2vec2:group",
    "wav2vec2:layer",
    "hubert:group",
    "hubert:layer",
    "wavlm:group",
    "wavlm:layer",
    "unispeech:group",
    "unispeech-sat:group",
    "wav2vec2-bert",
    "parakeet_ctc",
    "wav2vec2-conformer:group",  # its convolutions see padding: run example by example
)


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm().clamp(min=1e-12)).item()


def waves(data) -> list:
    import soundfile as sf

    return [sf.read(item.audio, dtype="float32")[0] for item in data["utterances"]]


def own(path: str, data) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]:
    """(summed loss, its gradients, logits of each) by transformers: each recording alone through its own processor."""
    model = hf.AutoModelForCTC.from_pretrained(path)
    model.config.ctc_loss_reduction, model.config.ctc_zero_infinity = "sum", False
    if hasattr(model.config, "apply_spec_augment"):
        model.config.apply_spec_augment = False
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.eval()
    extractor, tokenizer = hf.AutoFeatureExtractor.from_pretrained(path), hf.AutoTokenizer.from_pretrained(path)
    total, logits = 0.0, []
    for wave, utterance in zip(waves(data), data["utterances"], strict=True):
        inputs = extractor([wave], sampling_rate=16000, return_tensors="pt")
        labels = torch.tensor([tokenizer(utterance.text).input_ids])
        # Parakeet's own lengths come with the mask; without one its loss has none.
        out = model(**inputs, labels=labels)
        out.loss.backward()
        total += float(out.loss.detach())
        logits.append(out.logits[0].detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, logits


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_a_padded_batch_are_those_of_each_recording_alone(make_task, model_of, collated, family):
    path = model_of(family)
    task = make_task(path)
    data = collated(task.processing)
    assert len(set(data["lengths"].tolist())) == 4  # ragged
    expected, gradients, logits = own(path, data)
    loss = task.loss(data)
    assert loss.count == len("hello worldciao bellaatre volte")
    assert float(loss.sum.detach()) == pytest.approx(expected, rel=1e-5)
    loss.sum.backward()
    found = {name: p.grad for name, p in task.speech.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    largest = max(float(value.norm()) for value in gradients.values())
    for name, gradient in gradients.items():
        if float(gradient.norm()) < 1e-5 * largest:  # biases that a norm takes out: rounding only
            continue
        assert relative(found[name], gradient) < 2e-4, name
    with torch.no_grad():
        mine, frames = task.eval().heard(data)
    for row, count, other in zip(mine, frames.tolist(), logits, strict=True):
        assert count in (len(other), len(other) - 1)  # Parakeet's extractor gives one frame more, and masks it
        torch.testing.assert_close(row[:count], other[:count], rtol=0, atol=2e-5)
