"""Losses of online reinforcement learning against the formulas of their papers, forward and gradient.

The formulas are written down in numpy, completion by completion, as TRL 1.16 has them (`GRPOTrainer._compute_loss`,
`RLOOTrainer._compute_loss`) where it does; gradients are their central differences in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch

from luthier.modalities.llm.grpo.config import GroupTask, Name
from luthier.modalities.llm.losses.kl import divergence
from luthier.modalities.llm.losses.online import ONLINE
from luthier.modalities.llm.losses.sampled import Sampled, Settings, denominator, weights

COUNTS = np.array([3, 8, 1, 5, 2, 6])
A, R = len(COUNTS), int(COUNTS.sum())
Array = np.ndarray[Any, np.dtype[np.float64]]


def of_completion(name: str, own: Array, old: Array, advantage: float, s: Settings) -> Array:
    """[T] losses of the tokens of one completion."""
    ratio = np.exp(own - old)
    if name == "gspo":
        ratio = np.full_like(own, np.exp((own - old).mean()))
    if name == "rloo":
        ratio = np.full_like(own, np.exp((own - old).sum()))
    if name == "cispo":
        return -np.minimum(ratio, s.ratio_cap) * advantage * own
    if name == "sapo":
        tau = s.temperature_positive if advantage > 0 else s.temperature_negative
        return -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantage
    capped = ratio if s.ratio_cap is None else np.minimum(ratio, s.ratio_cap)
    return -np.minimum(capped * advantage, np.clip(ratio, 1 - s.clip_low, 1 + s.clip_high) * advantage)


def reference(name: str, own: Array, old: Array, advantages: Array, s: Settings) -> float:
    """The mean loss: over completions of the means over tokens, over tokens, or by Dr. GRPO's constant."""
    bounds = np.cumsum(COUNTS)[:-1]
    each = [
        of_completion(name, *parts, s)
        for (*parts,) in zip(np.split(own, bounds), np.split(old, bounds), advantages, strict=True)
    ]
    if name in ("grpo", "gspo", "sapo", "rloo"):
        return float(np.mean([one.mean() for one in each]))
    total = sum(one.sum() for one in each)
    return float(total / (A * s.max_tokens) if name == "dr_grpo" else total / R)


def ours(name: str, own: Array, old: Array, advantages: Array, s: Settings) -> tuple[float, Array]:
    """(mean loss, its gradient)."""
    counts = torch.from_numpy(COUNTS)
    leaf = torch.tensor(own, requires_grad=True)
    given = Sampled(leaf, torch.tensor(old), torch.tensor(advantages).repeat_interleave(counts), counts)
    online = ONLINE[name]
    total = (online.term(given, s) * weights(online.share, counts, torch.float64)).sum()
    loss = total / denominator(online.share, A, R, s.max_tokens)
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad.numpy()


def given(seed: int = 0) -> tuple[Array, Array, Array]:
    """Log-probabilities, so far from the old ones that ratios lie on all sides of every clip, and advantages."""
    random = np.random.default_rng(seed)
    own = -random.uniform(0.1, 4, R)
    return own, own + random.normal(0, 0.4, R), random.normal(0, 1.5, A)


def differences(function: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    found = np.empty_like(at)
    for place in range(len(at)):
        moved = np.zeros_like(at)
        moved[place] = step
        found[place] = (function(at + moved) - function(at - moved)) / (2 * step)
    return found


@pytest.mark.parametrize("name", get_args(Name))
@pytest.mark.parametrize("changes", [{}, {"clip_low": 0.1, "clip_high": 0.3, "ratio_cap": 1.4}], ids=["usual", "other"])
def test_a_loss_and_its_gradient(name: str, changes: dict[str, Any]) -> None:
    settings = GroupTask(kind="llm.grpo", loss=name, **changes).settings(10)
    own, old, advantages = given()
    loss, gradient = ours(name, own, old, advantages, settings)
    assert loss == pytest.approx(reference(name, own, old, advantages, settings), rel=1e-9)
    if name == "cispo":  # of the weight no gradient is taken
        fixed = np.minimum(np.exp(own - old), settings.ratio_cap) * np.repeat(advantages, COUNTS)
        expected = -fixed / R
    else:
        expected = differences(lambda x: reference(name, x, old, advantages, settings), own)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("name", get_args(Name))
def test_on_policy_the_gradient_is_that_of_the_weighted_log_probability(name: str) -> None:
    """At a ratio of 1 all losses push each token's log-probability by its advantage, weighed as they weigh tokens."""
    own, _, advantages = given()
    settings = GroupTask(kind="llm.grpo", loss=name).settings(10)
    _, gradient = ours(name, own, own.copy(), advantages, settings)
    share = {
        "completion": np.repeat(1 / COUNTS, COUNTS) / A, "token": np.full(R, 1 / R), "length": np.full(R, 0.1 / A),
    }[ONLINE[name].share]  # fmt: skip
    if name == "rloo":  # the whole completion is one action
        share = np.full(R, 1 / A)
    np.testing.assert_allclose(gradient, -np.repeat(advantages, COUNTS) * share, rtol=1e-9)


def test_a_clipped_token_has_no_gradient() -> None:
    settings = Settings(0.2, 0.28)
    own = np.log(np.array([1.3, 0.75, 1.3, 0.75, 1.1]))
    counts = torch.tensor([1, 1, 1, 1, 1])
    leaf = torch.tensor(own, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    term = ONLINE["dapo"].term(Sampled(leaf, torch.zeros(5, dtype=torch.float64), advantages, counts), settings)
    term.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 0).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_the_kl(estimator: Any) -> None:
    """By their formulas; k1 and k3 have the KL as their mean under the policy, which is exact over a vocabulary."""
    random = np.random.default_rng(1)
    logits, other = random.normal(0, 1, 7), random.normal(0, 1, 7)
    own, reference = (x - np.log(np.exp(x).sum()) for x in (logits, other))
    ratio = reference - own
    expected = {"k1": -ratio, "k2": ratio**2 / 2, "k3": np.exp(ratio) - 1 - ratio}[estimator]
    found = divergence(torch.tensor(own), torch.tensor(reference), estimator)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    if estimator != "k2":
        assert float((np.exp(own) * expected).sum()) == pytest.approx(float((np.exp(own) * -ratio).sum()), rel=1e-12)


def test_k2_in_the_loss_has_the_gradient_of_the_kl() -> None:
    """E[grad k2] = E[(log pi / ref) grad log pi], which is the gradient of KL(pi || ref)."""
    random = np.random.default_rng(2)
    reference = torch.log_softmax(torch.tensor(random.normal(0, 1, 7)), 0)
    logits = torch.tensor(random.normal(0, 1, 7), requires_grad=True)
    own = torch.log_softmax(logits, 0)
    (own.exp() * (own - reference)).sum().backward()
    exact = logits.grad.clone()  # type: ignore[union-attr]
    logits.grad = None
    own = torch.log_softmax(logits, 0)
    (own.detach().exp() * divergence(own, reference, "k2")).sum().backward()
    torch.testing.assert_close(logits.grad, exact, rtol=1e-9, atol=1e-12)
