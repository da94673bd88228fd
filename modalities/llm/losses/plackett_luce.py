"""Plackett-Luce: the probability of a whole ranking."""

from __future__ import annotations

import torch
from torch import Tensor


def plackett_luce(scores: Tensor, centering: float = 0.0) -> Tensor:
    """Scalar -log prod_k exp(s_k) / sum_{j >= k} exp(s_j) of scores [K], best answer first (Plackett, 1975; Luce,
    1959); for two answers that is Bradley-Terry. `centering` times the squared sums of neighbours' scores keeps them
    around 0.
    """
    ahead = scores.flip(0).logcumsumexp(0).flip(0)  # over an answer and those behind it
    loss = (ahead - scores)[:-1].sum()
    if centering:
        loss = loss + centering * torch.square(scores[1:] + scores[:-1]).sum()
    return loss
