"""KTO: answers that are good or bad, without pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def kto(
    ratio: Tensor,
    desirable: Tensor,
    divergence: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """[A] w (1 - sigma(+-beta (ratio - z))): + for a desirable answer, - for an undesirable one (Ethayarajh et al.,
    arXiv:2402.01306, eq. 8).

    Args:
        ratio: [A] log pi(answer) / ref(answer), in nats.
        desirable: [A] bool.
        divergence: z, scalar, at least 0, no gradient: estimate of KL(pi || ref), by `kl_estimate`.
        beta: how soon the loss saturates.
        desirable_weight: of desirable answers.
        undesirable_weight: of the others.
    """
    good = desirable.to(ratio.dtype)
    sign, weight = 2 * good - 1, desirable_weight * good + undesirable_weight * (1 - good)
    return weight * (1 - torch.sigmoid(sign * beta * (ratio - divergence.detach())))


def kl_estimate(ratio: Tensor) -> Tensor:
    """z = max(0, mean of log pi(y') / ref(y')) over answers y' that belong to other prompts than theirs [A]; 0 of none.
    A biased estimate, of which no gradient is taken (the paper's eq. 7)."""
    return ratio.detach().mean().clamp(min=0) if len(ratio) else ratio.new_zeros(())


def apo_zero_unpaired(
    ratio: Tensor,
    desirable: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """[A] w (1 - sigma(+-beta ratio)), KTO with z = 0 (D'Oosterlinck et al., arXiv:2408.06266, eq. 7 of one answer)."""
    return kto(ratio, desirable, ratio.new_zeros(()), beta, desirable_weight, undesirable_weight)
