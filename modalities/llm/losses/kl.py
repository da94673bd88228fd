"""Estimates of KL(policy || reference) from tokens that the policy has drawn (Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def divergence(log_probs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Of each token, from log-probabilities of one shape, in nats. With x = log reference / policy:

    - k1 = -x: unbiased, of either sign. As a loss its expected gradient is zero: it belongs into the reward.
    - k2 = x^2 / 2: its gradient is that of KL(policy || reference) (Tang and Munos, arXiv:2506.09477).
    - k3 = exp(x) - x - 1: unbiased and never negative (in GRPO's loss, arXiv:2402.03300, eq. 4).
    """
    ratio = reference - log_probs
    if estimator == "k1":
        return -ratio
    return ratio.square() / 2 if estimator == "k2" else ratio.exp() - ratio - 1
