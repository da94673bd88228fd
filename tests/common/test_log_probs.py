"""Fused log-probabilities equal those of torch's log-softmax over all logits, forward and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from luthier.common import losses
from luthier.common.losses import TokenLoss, linear_log_probs, log_probs

KINDS = [TokenLoss(), TokenLoss(scale=0.3), TokenLoss(softcap=2.0), TokenLoss(scale=1.7, softcap=1.5, smoothing=0.3)]


def given(rows: int = 150) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(11, (rows,)), torch.randn(rows, dtype=torch.float64)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, kind: TokenLoss) -> Tensor:
    logits = hidden @ weight.T * kind.scale
    if kind.softcap is not None:
        logits = kind.softcap * torch.tanh(logits / kind.softcap)
    return logits.log_softmax(dim=1)[torch.arange(len(labels)), labels]


@pytest.mark.parametrize("frozen", ["none", "weight", "hidden"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: TokenLoss, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 64 rows; what the model's smoothing would add has no place here."""
    monkeypatch.setitem(losses.CHUNK, "cpu", 1)
    hidden, weight, labels, factors = given()
    trained = [one for name, one in (("hidden", hidden), ("weight", weight)) if name != frozen]
    for one in (hidden, weight):
        one.requires_grad_(any(one is other for other in trained))
    expected = plain(hidden, weight, labels, kind)
    wanted = torch.autograd.grad((expected * factors).sum(), trained)
    found = linear_log_probs(hidden, weight, labels, kind)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad((found * factors).sum(), trained), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_without_rows_there_is_nothing() -> None:
    hidden, weight, labels, _ = given(0)
    found = linear_log_probs(hidden, weight, labels)
    assert found.shape == (0,)
    found.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_of_logits_in_memory() -> None:
    hidden, weight, labels, _ = given()
    torch.testing.assert_close(log_probs(hidden @ weight.T, labels), plain(hidden, weight, labels, TokenLoss()))


def test_lower_precision_under_autocast() -> None:
    """bfloat16 products, float32 sums: as near as 8 bits allow."""
    hidden, weight, labels, _ = given()
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_log_probs(hidden.float(), weight.float(), labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), plain(hidden, weight, labels, TokenLoss()), rtol=0.05, atol=0.05)
