"""Losses of pairs against TRL's formulas on the same log-probabilities, forward and gradient.

The formulas are written down from TRL 1.16 (`DPOTrainer._compute_loss`, `CPOTrainer.cpo_loss`,
`ORPOTrainer.odds_ratio_loss`) in numpy; gradients are their central differences in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch

from luthier.modalities.llm.dpo.config import FREE, Name
from luthier.modalities.llm.losses.named import LOSSES
from luthier.modalities.llm.losses.pairs import Pairs, Settings

P = 7
COUNTS = np.array([3.0, 8, 1, 5, 20, 4, 9]), np.array([6.0, 2, 1, 7, 11, 30, 9])
Array = np.ndarray[Any, np.dtype[np.float64]]


def sigma(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def logsigma(x: Array) -> Array:
    return -np.logaddexp(0, -x)


def scores(log_ratio: Array, s: Settings) -> Array:
    match s.f_divergence:
        case "forward_kl":
            return 1 - np.exp(-log_ratio)
        case "js_divergence":
            return np.log(2) + logsigma(log_ratio)
        case "alpha_divergence":
            coef = 1 / (s.f_alpha - 1)
            return (np.exp(np.minimum((s.f_alpha - 1) * log_ratio, 80)) - 1) * coef
    return log_ratio


def dpo(name: str, given: Array, s: Settings) -> Array:
    """TRL's losses by name, of rows chosen, rejected, reference chosen, reference rejected."""
    chosen, rejected = given[0] - given[2], given[1] - given[3]
    cs, rs = scores(chosen, s), scores(rejected, s)
    delta, beta, eps = cs - rs, s.beta, s.label_smoothing
    match name:
        case "sigmoid":
            return -logsigma(beta * delta)
        case "hinge":
            return np.maximum(0, 1 - beta * delta)
        case "ipo":
            return (cs / COUNTS[0] - rs / COUNTS[1] - 1 / (2 * beta)) ** 2
        case "exo_pair":
            qw, ql = sigma(beta * delta), sigma(-beta * delta)
            return qw * (logsigma(beta * delta) - np.log1p(-eps)) + ql * (logsigma(-beta * delta) - np.log(eps))
        case "nca_pair":
            return -logsigma(beta * chosen) - 0.5 * logsigma(-beta * chosen) - 0.5 * logsigma(-beta * rejected)
        case "robust":
            clean, flipped = -(1 - eps) * logsigma(beta * delta), -eps * logsigma(-beta * delta)
            return (clean - flipped) / (1 - 2 * eps)
        case "bco_pair":
            return -logsigma(beta * chosen) - logsigma(-beta * rejected)
        case "sppo_hard":
            return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
        case "aot" | "aot_unpaired":
            if name == "aot":
                d = np.sort(given[0] - given[1]) - np.sort(given[2] - given[3])
            else:
                d = np.sort(chosen) - np.sort(rejected)
            return -logsigma(beta * d) * (1 - eps) - logsigma(-beta * d) * eps
        case "apo_zero":
            return 1 - sigma(beta * chosen) + sigma(beta * rejected)
        case "apo_down":
            return sigma(beta * chosen) + 1 - sigma(beta * (chosen - rejected))
        case "discopop":
            logits = delta * beta
            mix = sigma(logits / s.discopop_tau)
            return -logsigma(logits) * (1 - mix) + np.exp(-logits) * mix
        case "sigmoid_norm":
            return -logsigma(beta * (cs / COUNTS[0] - rs / COUNTS[1]))
    raise KeyError(name)


def free(name: str, given: Array, s: Settings) -> Array:
    """TRL's losses without a reference."""
    chosen, rejected = given[0] / COUNTS[0], given[1] / COUNTS[1]
    if name == "orpo":
        odds = (chosen - rejected) - (np.log1p(-np.exp(chosen)) - np.log1p(-np.exp(rejected)))
        return -s.beta * logsigma(odds)
    logits = chosen - rejected - s.simpo_gamma / s.beta if name == "simpo" else given[0] - given[1]
    return -logsigma(s.beta * logits) * (1 - s.label_smoothing) - logsigma(-s.beta * logits) * s.label_smoothing


def reference(name: str) -> Callable[[Array, Settings], Array]:
    return lambda given, s: (free if name in FREE else dpo)(name, given, s)


def log_probs() -> Array:
    """Sums over 1 to 30 tokens; references near them, the third pair's reference equal to the model."""
    random = np.random.default_rng(0)
    own = np.stack([-random.uniform(0.2, 3, P) * count for count in COUNTS])
    other = own + random.normal(0, 2, (2, P))
    other[:, 2] = own[:, 2]
    return np.concatenate([own, other])


def ours(name: str, given: Array, s: Settings) -> tuple[Array, Array]:
    """(losses, gradient of their weighted sum by the model's log-probabilities)."""
    tensors = [
        torch.tensor(row, dtype=torch.float64, requires_grad=row_number < 2) for row_number, row in enumerate(given)
    ]
    counts = [torch.tensor(one, dtype=torch.float64) for one in COUNTS]
    losses = LOSSES[name](Pairs(*tensors, *counts), s)
    (losses * torch.arange(1.0, P + 1)).sum().backward()
    gradient = torch.stack([torch.zeros(P) if one.grad is None else one.grad for one in tensors[:2]])
    return losses.detach().numpy(), gradient.numpy()


CASES = [(name, Settings(beta=0.3, label_smoothing=0.1)) for name in get_args(Name)]
CASES += [(name, Settings(beta=2.0, label_smoothing=0.01, simpo_gamma=1.4)) for name in get_args(Name)]
CASES += [
    (name, Settings(beta=0.5, label_smoothing=0.2, f_divergence=divergence, f_alpha=alpha))
    for name in ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm")
    for divergence, alpha in (("forward_kl", 0.5), ("js_divergence", 0.5), ("alpha_divergence", 0.5),
                              ("alpha_divergence", 1.7))
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_losses_are_trl_s_forward_and_gradient(name: str, settings: Settings) -> None:
    given, wanted = log_probs(), reference(name)
    found, gradient = ours(name, given, settings)
    np.testing.assert_allclose(found, wanted(given, settings), rtol=1e-9, atol=1e-12)
    weights = np.arange(1.0, P + 1)
    for row in range(2):
        for pair in range(P):
            step = np.zeros_like(given)
            step[row, pair] = 1e-6
            up, down = (float((wanted(given + sign * step, settings) * weights).sum()) for sign in (1, -1))
            assert gradient[row, pair] == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6), (row, pair)


def test_every_name_has_its_loss() -> None:
    assert set(LOSSES) == set(get_args(Name))
    assert set(FREE) < set(LOSSES)


def test_alpha_one_is_the_reverse_kl() -> None:
    given = log_probs()
    plain = ours("sigmoid", given, Settings())
    limit = ours("sigmoid", given, Settings(f_divergence="alpha_divergence", f_alpha=1.0))
    assert all((one == other).all() for one, other in zip(plain, limit, strict=True))


def test_at_the_reference_the_loss_is_ln_2() -> None:
    given = log_probs()
    given[2:] = given[:2]
    for name in ("sigmoid", "robust", "aot", "aot_unpaired", "sigmoid_norm"):
        assert (ours(name, given, Settings())[0] == np.log(2.0)).all(), name


def test_orpo_of_answers_that_are_nearly_sure_has_a_gradient() -> None:
    """log(1 - p) of p = 1 - 1e-12 keeps its digits."""
    given = log_probs()
    given[0], given[1] = -1e-12 * COUNTS[0], -2e-12 * COUNTS[1]
    losses, gradient = ours("orpo", given, Settings())
    np.testing.assert_allclose(losses, -0.1 * logsigma(np.full(P, np.log(2.0))), rtol=1e-6)
    assert np.isfinite(gradient).all()
    assert (gradient[0] < 0).all()
    assert (gradient[1] > 0).all()
