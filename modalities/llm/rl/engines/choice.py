"""Drawing the next token of each row, from one random number for each."""

from __future__ import annotations

import torch
from torch import Tensor

from .engine import Sampling


def choose(logits: Tensor, random: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """([B] tokens, [B] their log-probabilities) from logits [B, V] in float32, by the inverse of the cumulative
    distribution: a row's token depends on its own logits and number alone.

    Args:
        logits: overwritten.
        random: [B] uniform in [0, 1).
        sampling: temperature, top-p and top-k.
    """
    if sampling.temperature not in (0.0, 1.0):
        logits = logits.div_(sampling.temperature)
    log_total = logits.logsumexp(dim=1, keepdim=True)
    if sampling.temperature == 0:
        found = logits.argmax(dim=1, keepdim=True)
    else:
        found = _drawn(logits, log_total, random, sampling)
    return found[:, 0], (logits.gather(1, found) - log_total)[:, 0]


def _drawn(logits: Tensor, log_total: Tensor, random: Tensor, sampling: Sampling) -> Tensor:
    """[B, 1] tokens."""
    weights = (logits - log_total).exp_()
    if sampling.top_k is not None and sampling.top_k < weights.shape[1]:
        least = weights.topk(sampling.top_k, dim=1).values[:, -1:]
        weights.masked_fill_(weights < least, 0.0)
    if sampling.top_p < 1:
        ordered, order = weights.sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(dim=1) - ordered
        ordered.masked_fill_(before >= sampling.top_p * ordered.sum(dim=1, keepdim=True), 0.0)
        weights.scatter_(1, order, ordered)
    reached = weights.cumsum(dim=1)
    found = torch.searchsorted(reached, random[:, None] * reached[:, -1:], right=True)
    found.clamp_(max=weights.shape[1] - 1)
    # A number that rounds to 1 would take the last token, whatever its weight.
    return torch.where(weights.gather(1, found) > 0, found, weights.argmax(dim=1, keepdim=True))
