"""NeMo's losses: the value and the gradient that NeMo's own training step has, over any cut into batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from luthier.common.seeding import seed_everything

pytest.importorskip("nemo")

ROWS = (0, 1, 2, 6, 11)
KINDS = ("ctc", "rnnt", "tdt", "hybrid", "streamed")


def theirs(task: Any, wave: torch.Tensor, lengths: torch.Tensor, data: dict[str, Any]) -> torch.Tensor:
    """The loss of NeMo's `training_step`, whose logging needs a trainer, with a fresh copy of their loss modules."""
    from nemo.collections.asr.losses.ctc import CTCLoss
    from nemo.collections.asr.losses.rnnt import RNNTLoss

    nemo, size = task.nemo, len(task.processing.tokens.pieces)
    ctc = CTCLoss(num_classes=size, zero_infinity=True, reduction="mean_batch")
    texts = {"targets": data["tokens"], "target_lengths": data["lengths"]}
    kind = task.processing.origin.name
    if kind == "EncDecCTCModel":
        log_probs, frames, _ = nemo(input_signal=wave, input_signal_length=lengths)
        return ctc(log_probs=log_probs, input_lengths=frames, **texts)
    encoded, frames = nemo(input_signal=wave, input_signal_length=lengths)
    predicted, _, _ = nemo.decoder(targets=data["tokens"], target_length=data["lengths"])
    joint = nemo.joint(encoder_outputs=encoded, decoder_outputs=predicted)
    name, settings = nemo.extract_rnnt_loss_cfg(nemo.cfg.loss)
    if name == "tdt":  # the one that would run on a CPU, were it not for its calls of `cuda`
        name, settings = "tdt_pytorch", {"durations": list(settings.durations), "sigma": settings.sigma}
    rnnt = RNNTLoss(num_classes=size, loss_name=name, loss_kwargs=settings)
    loss = rnnt(log_probs=joint, input_lengths=frames, **texts)
    if "Hybrid" not in kind:
        return loss
    log_probs = nemo.ctc_decoder(encoder_output=encoded)
    return 0.7 * loss + 0.3 * ctc(log_probs=log_probs, input_lengths=frames, **texts)


def gradients(task: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_nemo_s(make_task, saved_of, collated, wave_batch, monkeypatch, kind):
    """In train mode too: dropout and contexts are drawn alike, and batch norms see the same padding."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    task = make_task(saved_of(kind), model={"config": {"preprocessor.dither": 0.0}})
    data = collated(task.processing, ROWS)
    for training in (False, True):
        task.train(training)
        task.zero_grad()
        seed_everything(5)
        expected = theirs(task, *wave_batch(ROWS), data)
        expected.backward()
        wanted = gradients(task)
        task.zero_grad()
        seed_everything(5)
        found = task.loss(data)
        assert found.count == len(ROWS)
        (found.sum / found.count).backward()
        torch.testing.assert_close(found.sum / found.count, expected, rtol=1e-5, atol=1e-5)
        assert wanted.keys() == gradients(task).keys()
        for name, gradient in gradients(task).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=2e-5, msg=name)


def test_rnnt_is_the_sum_over_all_alignments(make_task, saved_of, collated):
    """Of the shortest example, by going through the alignments (Graves 2012) one by one."""
    task = make_task(saved_of("rnnt"))
    task.eval()
    data = collated(task.processing, (5, 10))  # "a" and "re"
    with torch.no_grad():
        encoded, frames = task.encode(data)
        losses, _ = task.head.losses(encoded, frames, data)
        predicted, _, _ = task.nemo.decoder(targets=data["tokens"], target_length=data["lengths"])
        log_probs = task.nemo.joint(encoder_outputs=encoded, decoder_outputs=predicted)[1].log_softmax(-1)
    ids, steps, blank = data["tokens"][1].tolist(), int(frames[1]), len(task.processing.tokens.pieces)

    def paths(t: int, u: int) -> float:
        """Probability of all that may follow from frame t with u tokens written."""
        stay = float(log_probs[t, u, blank].exp())
        rest = stay * (paths(t + 1, u) if t + 1 < steps else float(u == len(ids)))
        return rest + (float(log_probs[t, u, ids[u]].exp()) * paths(t, u + 1) if u < len(ids) else 0.0)

    assert float(losses[1]) == pytest.approx(-math.log(paths(0, 0)), rel=1e-4)


@pytest.mark.parametrize("kind", ["rnnt", "tdt", "hybrid"])
def test_a_joint_in_parts_has_the_same_gradient(make_task, saved_of, collated, kind):
    found = []
    for size in (None, 2):
        task = make_task(saved_of(kind), model={"joint_batch": size})
        task.eval()
        result = task.loss(collated(task.processing, ROWS))
        result.sum.backward()
        found.append((result.sum.detach(), gradients(task)))
    (one, wanted), (other, same) = found
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    for name in wanted:
        torch.testing.assert_close(same[name], wanted[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["ctc", "rnnt", "hybrid"])
@pytest.mark.parametrize("reduction", ["mean_batch", "mean_volume", "mean"])
def test_sums_and_counts_add_up_to_the_model_s_mean(make_task, saved_of, collated, kind, reduction):
    """Whatever the batches: of NeMo's own means only `mean_batch` over equal batches could be averaged again."""
    settings = {"ctc_reduction": reduction, "rnnt_reduction": reduction}
    if kind == "hybrid":
        settings["aux_ctc.ctc_reduction"] = reduction
    task = make_task(saved_of(kind), model={"config": settings})
    task.eval()
    with torch.no_grad():
        whole = task.loss(collated(task.processing, ROWS))
        parts = [task.loss(collated(task.processing, rows)) for rows in ((0,), (1, 2, 6), (11,))]
        data = collated(task.processing, ROWS)
        losses, _ = task.head.losses(*task.encode(data), data)
    lengths = data["lengths"]
    mean = {
        "mean_batch": losses.mean(),
        "mean_volume": losses.sum() / lengths.sum(),
        "mean": (losses / lengths).mean(),
    }[reduction]
    assert float(whole.sum) / whole.count == pytest.approx(float(mean), rel=1e-6)
    assert sum(part.count for part in parts) == whole.count
    assert sum(float(part.sum) for part in parts) == pytest.approx(float(whole.sum), rel=1e-4)
