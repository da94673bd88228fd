"""Loss and gradients of the Whisper task, against transformers' model and torch's own losses on its logits."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn import functional
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from luthier.common.data.collect import collect
from luthier.common.data.processing import Batch
from luthier.modalities.asr.losses import ctc
from luthier.modalities.asr.whisper.model import encode

FRAMES = 200  # of the 2 s that the tiny models hear


def reference(path: str) -> hf.WhisperForConditionalGeneration:
    return hf.WhisperForConditionalGeneration.from_pretrained(path)


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


# ---------------------------------------------------------------------------------------------- cross-entropy


@pytest.mark.parametrize("kind", ["multilingual", "english"])
def test_loss_and_gradients_equal_transformers(request, make_task, collated, kind):
    path = request.getfixturevalue(kind)
    task, model = make_task(path), reference(path)
    batch = collated(task.processing)
    assert batch["features"].shape == (4, 80, FRAMES)
    assert len({int((row != -100).sum()) for row in batch["labels"]}) == 4  # ragged
    loss = task.loss(batch)
    expected = model(input_features=batch["features"], labels=batch["labels"]).loss * loss.count
    assert loss.count == (batch["labels"] != -100).sum()
    torch.testing.assert_close(loss.sum, expected, rtol=1e-5, atol=0)
    loss.sum.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in task.whisper.named_parameters()}
    compared = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # the encoder's positions, as in transformers
            assert gradients[name] is None
            continue
        assert parameter.grad.norm() > 0, name
        assert relative(gradients[name], parameter.grad) < 1e-5, name
        compared += 1
    assert compared > 50


def test_loss_with_prompts_equals_transformers(make_task, multilingual, examples):

    task, model = make_task(multilingual), reference(multilingual)
    processing = task.processing
    chosen = [
        replace(item, prompt=prompt)
        for item, prompt in zip(examples(processing), ["so", None, "before that"], strict=False)
    ]
    batch = processing.collate([processing.encode(item, None) for item in chosen], None)
    loss = task.loss(batch)
    expected = model(
        input_features=batch["features"], decoder_input_ids=batch["input_ids"], labels=batch["labels"]
    ).loss
    torch.testing.assert_close(loss.sum / loss.count, expected, rtol=1e-5, atol=0)
    # Control tokens after the start, text and end of each row; no prompt: (3 + 11 + 1) + (3 + 10 + 1) + (3 + 13 + 1).
    assert loss.count == 46


def test_an_example_s_loss_does_not_depend_on_its_batch(make_task, multilingual, collated):
    task = make_task(multilingual)
    whole = task.loss(collated(task.processing, range(4)))
    parts = [task.loss(collated(task.processing, [row])) for row in range(4)]
    assert whole.count == sum(part.count for part in parts)
    torch.testing.assert_close(whole.sum, torch.stack([part.sum for part in parts]).sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_equals_torch(make_task, multilingual, collated, smoothing):
    task = make_task(multilingual, task={"label_smoothing": smoothing})
    batch = collated(task.processing)
    logits = reference(multilingual)(input_features=batch["features"], labels=batch["labels"]).logits
    expected = functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", label_smoothing=smoothing
    )
    torch.testing.assert_close(task.loss(batch).sum, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("real", [1, 37, 100, 150, 170, 184, 185, 199, 200])
def test_constant_padding_is_convolved_once(make_task, multilingual, real):
    """Output and gradients with the shortcut equal those without, wherever the padding begins."""
    task = make_task(multilingual)
    features = torch.randn(2, 80, FRAMES)
    features[0, :, real:], features[1, :, real:] = 0.3, -0.7
    weights = list(task.whisper.model.encoder.parameters())[:4]
    found = []
    for known in (real, None):
        out = encode(task.whisper, features, known)
        found.append((out, *torch.autograd.grad(out.square().sum(), weights)))
    for one, other in zip(*found, strict=True):
        assert relative(one, other) < 1e-5


# ---------------------------------------------------------------------------------------------- encoder


def test_full_context_is_transformers_encoder(multilingual):
    model = reference(multilingual)
    features = torch.randn(3, 80, FRAMES)
    expected = model.model.encoder(features).last_hidden_state
    torch.testing.assert_close(encode(model, features), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("frames", [2, 50, 126, 198])
def test_a_shorter_context_is_an_encoder_cut_to_it(multilingual, frames):
    """The same weights in an encoder that was configured for so many positions."""
    model = reference(multilingual)
    config = copy.deepcopy(model.config)
    config.max_source_positions = frames // 2
    short = WhisperEncoder(config).eval()
    weights = dict(model.model.encoder.state_dict())
    weights["embed_positions.weight"] = weights["embed_positions.weight"][: frames // 2]
    short.load_state_dict(weights)
    features = torch.randn(2, 80, frames)
    found = encode(model, features)
    assert found.shape == (2, frames // 2, 32)
    torch.testing.assert_close(found, short(features).last_hidden_state, rtol=0, atol=1e-6)


def test_dynamic_context_trains_with_the_same_gradients_as_such_an_encoder(make_task, multilingual, collated):
    task = make_task(multilingual, model={"audio_context": "dynamic", "long_context_share": 0})
    batch = collated(task.processing, (0, 1, 2), np.random.default_rng(0))
    frames = batch["features"].shape[2]
    assert frames < FRAMES
    loss = task.loss(batch)
    loss.sum.backward()
    model = reference(multilingual)
    model.config.max_source_positions = frames // 2
    encoder = model.model.encoder
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(encoder.embed_positions.weight[: frames // 2].detach())
    expected = model(input_features=batch["features"], labels=batch["labels"]).loss * loss.count
    torch.testing.assert_close(loss.sum, expected, rtol=1e-5, atol=0)
    expected.backward()
    for name in ("conv1.weight", "layers.0.fc1.weight", "layer_norm.weight"):
        found, other = (e.get_parameter(name).grad for e in (task.whisper.model.encoder, encoder))
        assert relative(found, other) < 1e-5, name


def test_a_bfloat16_model_takes_float32_features(make_task, multilingual, collated):
    plain = make_task(multilingual)
    batch = collated(plain.processing)
    task = make_task(
        multilingual,
        task={"ctc_weight": 0.5},
        train={"precision": "bf16-true"},
    )
    assert {parameter.dtype for parameter in task.parameters()} == {torch.bfloat16}
    assert batch["features"].dtype == torch.float32
    loss = task.loss(batch)
    assert loss.sum.dtype == torch.float32
    loss.sum.backward()
    assert all(p.grad.isfinite().all() for p in task.parameters() if p.requires_grad)
    # bfloat16 keeps 8 bits: 2 ** -8 a rounding.
    assert loss.logs["cross_entropy"] == pytest.approx(float(plain.loss(batch).sum.detach()), rel=0.02)


# ---------------------------------------------------------------------------------------------- CTC


@pytest.mark.parametrize("context", ["full", "dynamic"])
def test_ctc_loss_equals_torch_for_each_example(make_task, multilingual, collated, context):
    torch.manual_seed(0)
    task = make_task(
        multilingual,
        task={"ctc_weight": 0.3},
        model={"audio_context": context, "long_context_share": 0},
    )
    batch = collated(task.processing, generator=np.random.default_rng(0))
    vocabulary = task.whisper.config.vocab_size
    assert task.ctc_head.out_features == vocabulary + 1
    encoded = encode(task.whisper, batch["features"])
    expected, targets = 0.0, task.processing.targets
    for row, utterance in enumerate(batch["utterances"]):
        # 100 frames a second before the encoder halves them; up to two more reach into the padding.
        positions = (int(batch["frames"][row]) + 1) // 2
        assert 50 * utterance.duration <= positions <= 50 * utterance.duration + 2
        logs = task.ctc_head(encoded[row, :positions]).log_softmax(-1)
        labels = torch.tensor(targets.target(utterance).text[:-1])
        expected += functional.ctc_loss(
            logs, labels, torch.tensor(positions), torch.tensor(len(labels)), blank=vocabulary, reduction="sum"
        )
    loss = task.loss(batch)
    assert math.isfinite(loss.logs["ctc"])
    assert loss.logs["ctc"] == pytest.approx(float(expected.detach()), rel=1e-5)
    plain = make_task(multilingual).loss(batch) if context == "full" else None
    if plain is not None:
        assert loss.logs["cross_entropy"] == pytest.approx(float(plain.sum.detach()), rel=1e-5)
    assert float(loss.sum.detach()) == pytest.approx(loss.logs["cross_entropy"] + 0.3 * loss.logs["ctc"], rel=1e-5)
    loss.sum.backward()
    assert task.ctc_head.weight.grad.norm() > 0


def test_ctc_by_hand():
    """Two frames, label a, blank b: a a, a b or b a, each with probability 1 / 3 ** 2 under 3 equal logits."""
    loss = ctc(torch.zeros(1, 2, 3), torch.tensor([2]), torch.tensor([0]), torch.tensor([1]))
    assert float(loss) == pytest.approx(-math.log(3 / 9))
    # The same, behind frames that aren't counted and beside an example of its own.
    loss = ctc(torch.zeros(2, 5, 3), torch.tensor([2, 1]), torch.tensor([0, 1]), torch.tensor([1, 1]))
    assert float(loss) == pytest.approx(-math.log(3 / 9) - math.log(1 / 3))
    # Fewer frames than labels: infinite, not silently 0.
    assert ctc(torch.zeros(1, 1, 3), torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([2])) == math.inf


def test_the_ctc_head_is_left_out_of_evaluation(make_task, multilingual, collated):
    """It is not saved, so that a loss with it could not be had again from the checkpoint."""
    task = make_task(multilingual, task={"ctc_weight": 0.3}).eval()
    batch = collated(task.processing)
    with torch.no_grad():
        expected = make_task(multilingual).eval().loss(batch)
        found = task.predict(Batch(0, 0, (0, 1, 2, 3), batch, 1.0, 1.0)).loss
    torch.testing.assert_close(found.sum, expected.sum, rtol=1e-5, atol=0)
    assert found.count == expected.count


def rows(manifest, *changed):
    """A manifest with the first rows' texts replaced."""
    lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    for line, text in zip(lines, changed, strict=False):
        line["text"] = text
    file = manifest.parent / f"changed-{abs(hash(changed))}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(file)


def test_examples_too_short_for_ctc_are_counted_before_training(make_processing, multilingual, manifest):
    """Row 1 has 0.6 s, 30 frames for the CTC: 30 letters fit if no two neighbours are equal, else one fewer."""
    letters = ("ab" * 15, "ab" * 14 + "aa", "ab" * 15 + "c")
    section = {"ctc_weight": 1.0}
    for text, fits in zip(letters, (True, False, False), strict=True):
        data = {"train": rows(manifest, text), "max_bad": 0.5}
        for task, count in ((section, 0 if fits else 1), ({}, 0)):
            processing = make_processing(multilingual, task=task, data=data)
            report = collect(processing.recipe.data.train, processing, processing.recipe.data).report
            assert dict(report.dropped) == ({"too_short_for_ctc": 1} if count else {})
            assert report.kept_rows == 12 - count


def test_ctc_is_checked_at_the_fastest_speed(make_processing, multilingual, manifest):
    """At twice the speed, 0.6 s are 15 frames; "ciao bella" in 0.7 s needs 11 of 17."""
    data = {"train": rows(manifest, "abcd" * 4), "max_bad": 0.5, "augment": {"speed": [0.9, 2.0]}}
    processing = make_processing(multilingual, task={"ctc_weight": 1.0}, data=data)
    report = collect(processing.recipe.data.train, processing, processing.recipe.data).report
    assert report.named.keys() == {"too_short_for_ctc"}
    assert ":1:" in report.named["too_short_for_ctc"][0]
