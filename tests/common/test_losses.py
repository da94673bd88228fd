"""The fused loss of an output layer, against torch's losses and against autograd on the whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from luthier.common import losses
from luthier.common.losses import TokenLoss, linear_cross_entropy, logits_of, token_loss

VOCABULARY, WIDTH = 11, 6
ROWS = 64  # the fewest of a chunk


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.CHUNK, "cpu", VOCABULARY * ROWS)


def given(number: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(number, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(VOCABULARY, (number,))


@pytest.mark.parametrize("number", [0, 5, ROWS, 2 * ROWS + 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_value_and_gradients_equal_torch(number: int, smoothing: float, factor: float) -> None:
    """Over no, one and several chunks, in float64."""
    hidden, weight, labels = given(number)
    loss = factor * linear_cross_entropy(hidden, weight, labels, TokenLoss(smoothing=smoothing))
    logits = hidden @ weight.T
    expected = factor * functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(value, (hidden, weight)) for value in (loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def written_out(hidden: Tensor, weight: Tensor, labels: Tensor, kind: TokenLoss) -> Tensor:
    """The definition, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for state, label in zip(hidden, labels, strict=True):
        z = kind.scale * (weight @ state)
        if kind.softcap is not None:
            z = kind.softcap * torch.tanh(z / kind.softcap)
        log_p = z - z.exp().sum().log()
        target = torch.full((VOCABULARY,), kind.smoothing / VOCABULARY, dtype=torch.float64)
        target[label] += 1 - kind.smoothing
        factor = log_p[label].exp().item() if kind.dynamic else 1.0
        total = total - factor * (target * log_p).sum() + kind.z_weight * z.exp().sum().log() ** 2
    return total


KINDS: list[dict[str, Any]] = [
    {"z_weight": 0.01}, {"dynamic": True}, {"scale": 0.3}, {"softcap": 2.0}, {"scale": 0.5, "softcap": 1.5},
    {"smoothing": 0.1, "z_weight": 0.1, "dynamic": True, "scale": 2.0, "softcap": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_variation_equals_its_definition(kind: dict[str, Any]) -> None:
    hidden, weight, labels = given(ROWS + 7)
    fused = linear_cross_entropy(hidden, weight, labels, TokenLoss(**kind))
    plain = token_loss(logits_of(hidden, weight, TokenLoss(**kind)), labels, TokenLoss(**kind))
    expected = written_out(hidden, weight, labels, TokenLoss(**kind))
    torch.testing.assert_close(fused, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    for loss in (fused, plain):
        for one, other in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight = torch.randn(3, 6, requires_grad=True), torch.randn(11, 6)
    linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2])).backward()
    assert weight.grad is None
    assert hidden.grad is not None
