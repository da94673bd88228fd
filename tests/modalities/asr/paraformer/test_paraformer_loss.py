"""Loss and gradients of the Paraformer task, against FunASR's own forward on the same batch and random numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from luthier.common.data.processing import Batch
from luthier.modalities.asr.paraformer import faster, network

SECTIONS = {
    "sanm": {},
    "conformer": {},
    "sanm_with_cif_v1": {"predictor": "CifPredictor", "model_conf": {"ctc_weight": 0.3}},
}


@pytest.fixture(scope="module")
def paths(directory_of) -> dict[str, str]:
    return {name: directory_of(name.split("_")[0], **changes) for name, changes in SECTIONS.items()}


def reference(auto_model: Any, path: str) -> Any:
    """FunASR's model, whose dropout draws as ours does."""
    with torch.random.fork_rng():
        model = auto_model(path).model.train()
    for module in model.modules():
        if type(module) is torch.nn.Dropout:
            module.__class__ = network.Dropout
    return model


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name].clone() for name in ("speech", "speech_lengths", "text", "text_lengths")}


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.usefixtures("_randomness")
@pytest.mark.parametrize("kind", SECTIONS)
def test_loss_and_gradients_equal_funasr(kind, paths, make_task, collated, auto_model, whole_seed):
    """In training mode, with dropout, masks and the sampler's draws: the same random numbers in the same order."""
    task, model = make_task(paths[kind]), reference(auto_model, paths[kind])
    task.train_mode()
    batch = collated(task.processing)
    assert len(set(batch["text_lengths"].tolist())) > 1  # ragged
    seed = whole_seed(lambda: model(**inputs(batch)))
    torch.manual_seed(seed)
    loss = task.loss(batch)
    loss.sum.backward()
    torch.manual_seed(seed)
    theirs, stats, weight = model(**inputs(batch))
    assert loss.count == weight.item() == (4 if kind == "conformer" else batch["tokens"] + 4)
    torch.testing.assert_close(loss.sum, theirs.squeeze() * weight.item(), rtol=1e-5, atol=0)
    for name, key in (("attention", "loss_att"), ("predictor", "loss_pre")):
        assert loss.logs[name] / loss.count == pytest.approx(stats[key].item(), rel=1e-5)
    (theirs * weight).backward()
    compared = 0
    for name, parameter in model.named_parameters():
        found = task.paraformer.get_parameter(name).grad
        if parameter.grad is None:
            assert found is None, name
            continue
        if parameter.grad.norm() < 1e-5:  # zero but for rounding, as the bias of attention's keys is
            assert found.norm() < 1e-4, name
            continue
        assert relative(found, parameter.grad) < 2e-4, name
        compared += 1
    assert compared > 40


@pytest.mark.parametrize("kind", ["sanm", "conformer"])
def test_an_accumulated_loss_is_that_of_the_whole_batch(kind, paths, make_task, gathered):
    """FunASR's mean of means is not: the parts have different numbers of rows and tokens. Without random draws, and
    with recordings of one length, as FunASR's models see a little of the padding."""
    task = make_task(paths[kind]).eval()
    task.paraformer.sampling_ratio = 0.0
    processing = task.processing
    longest = processing.encode(gathered(processing).examples[11], None)
    items = [replace(longest, ids=processing.tokens.encode(text)) for text in ("你好世界", "早", "今天", "再见朋友")]
    expected = task.loss(processing.collate(items, None))
    found = [task.loss(processing.collate(part, None)) for part in (items[:1], items[1:])]
    assert sum(part.count for part in found) == expected.count
    torch.testing.assert_close(sum(part.sum for part in found), expected.sum, rtol=1e-5, atol=0)
    means = torch.stack([part.sum / part.count for part in found]).mean()
    assert abs(float(means - expected.sum / expected.count)) > 1e-3


def test_padding_of_the_text_is_no_target(paths, make_task, gathered, auto_model):
    """0 is `<blank>`, and with it FunASR's loss is another."""
    task = make_task(paths["sanm"]).eval()
    task.paraformer.sampling_ratio = 0.0
    processing = task.processing
    longest = processing.encode(gathered(processing).examples[11], None)
    items = [replace(longest, ids=processing.tokens.encode(text)) for text in ("你好世界", "你好")]
    batch = processing.collate(items, None)
    assert batch["text"][1].tolist() == [*processing.tokens.encode("你好"), -1, -1]
    alone = [task.loss(processing.collate([item], None)) for item in items]
    assert [part.count for part in alone] == [4 + 1, 2 + 1]
    right = task.loss(batch)
    torch.testing.assert_close(right.sum, alone[0].sum + alone[1].sum, rtol=1e-5, atol=0)
    batch["text"] = batch["text"].clamp(min=0)
    assert abs(float(task.loss(batch).sum - right.sum)) > 1


def test_the_evaluation_s_loss_is_the_same_every_time(paths, make_task, collated):
    """FunASR's sampler shows the decoder random parts of the text, in evaluation too."""
    task = make_task(paths["sanm"]).eval()
    batch = collated(task.processing)
    losses = {float(task.predict(Batch(0, 0, (0, 1, 2, 11), batch, 1.0, 1.0)).loss.sum) for _ in range(3)}
    assert len(losses) == 1
    assert task.paraformer.sampling_ratio == 0.75


# ---------------------------------------------------------------------------------------------- faster parts


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_smoothed_cross_entropy_equals_funasr(smoothing, by_tokens):
    from funasr.losses.label_smoothing_loss import LabelSmoothingLoss

    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 7, (3, 5))
    target[0, 3:], target[2, 1:] = -1, -1
    expected = LabelSmoothingLoss(7, -1, smoothing, by_tokens)(logits, target)
    (wanted,) = torch.autograd.grad(expected, logits)
    found = faster.SmoothedCrossEntropy(7, -1, smoothing, by_tokens)(logits, target)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lengths", [(3, 2, 4), (3, 12, 4)])
def test_ctc_equals_funasr_with_and_without_an_example_that_is_too_short(lengths):
    """The second has 12 labels for 8 frames: FunASR leaves it out of the mean."""
    from funasr.models.ctc.ctc import CTC

    logits = torch.randn(10, 3, 6, requires_grad=True)
    labels, frames = torch.randint(1, 6, (sum(lengths),)), torch.tensor([10, 8, 9])
    expected = CTC(6, 6).loss_fn(logits, labels, frames, torch.tensor(lengths))
    assert expected.isfinite()
    (wanted,) = torch.autograd.grad(expected, logits)
    found = faster.ctc_loss(logits, labels, frames, torch.tensor(lengths))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], wanted, rtol=1e-4, atol=1e-6)


def scaled(counts: list[int], time: int, seed: int, flat: float = 1.0) -> torch.Tensor:
    """Weights [B, time] that sum up to the counts; with a low `flat` some are above 1."""
    weights = (0.3 + 0.7 * torch.rand(len(counts), time, generator=torch.Generator().manual_seed(seed))) ** (1 / flat)
    for row in range(len(counts)):
        weights[row, time - row :] = 0.0  # padding
    return weights * (torch.tensor(counts) / weights.sum(1))[:, None]


@pytest.mark.parametrize("name", ["cif", "cif_v1"])
@pytest.mark.parametrize("flat", [1.0, 0.2])
def test_integrate_and_fire_equals_funasr(flat, name):
    """Values and gradients of all tokens that FunASR finds. It loses the last one of a row where its sum misses the
    whole number by rounding; and with weights above 1, as at most one token ends in a frame, more of them."""
    from funasr.models.paraformer import cif_predictor

    compared = lost = ahead = 0
    for seed in range(20):
        counts = [9, 5, 7]
        weights = scaled(counts, 24, seed, flat).requires_grad_()
        ahead += int((weights > 1).sum())
        hidden = torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        expected, _ = getattr(cif_predictor, name)(hidden, weights, 1.0)
        found = faster.integrate_and_fire(hidden, weights, 9, one_by_one=name == "cif")
        assert found.shape == expected.shape
        for row, count in enumerate(counts):
            kept = int(expected[row].any(-1).sum())
            lost += count - kept
            assert int(found[row].any(-1).sum()) == count if flat == 1 else int(found[row].any(-1).sum()) >= kept
            missed = weights[row].detach().double().sum().float() < count
            kept -= int(missed and name == "cif_v1" and flat < 1)  # the last two may be one token, here but not there
            torch.testing.assert_close(found[row, :kept], expected[row, :kept], rtol=1e-4, atol=1e-5)
            mixed = torch.randn(kept, 8, generator=torch.Generator().manual_seed(row))
            gradients = [
                torch.autograd.grad((part[row, :kept] * mixed).sum(), [hidden, weights], retain_graph=True)
                for part in (found, expected)
            ]
            for one, other in zip(*gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            compared += kept
    assert compared > 300
    assert lost > 0
    assert (ahead > 0) == (flat < 1)


def test_every_token_gets_a_weight_of_one():
    """By hand: weights 0.5 0.7 0.8 close tokens in the second frame (0.5 + 0.5) and in the third (0.2 + 0.8)."""
    hidden = torch.eye(3)[None]
    found = faster.integrate_and_fire(hidden, torch.tensor([[0.5, 0.7, 0.8]]), 3)
    torch.testing.assert_close(found[0], torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.0, 0.0, 0.0]]))
    weights = scaled([9, 5, 7], 24, 1)
    sums = faster.integrate_and_fire(torch.ones(3, 24, 1), weights, 9).squeeze(-1)
    torch.testing.assert_close(sums, (torch.arange(9) < torch.tensor([[9], [5], [7]])).float())


def test_the_entropy_is_that_of_the_smoothed_target():
    """A prediction that equals the target has a divergence of 0."""
    target = torch.full((1, 1, 4), 0.1 / 3)
    target[0, 0, 2] = 0.9
    loss = faster.SmoothedCrossEntropy(4, -1, 0.1, False)(target.log(), torch.tensor([[2]]))
    assert math.isclose(float(loss), 0.0, abs_tol=1e-6)
