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
    weights = logits.sub_(logits.amax(dim=1, keepdim=True)).exp_()
    total = weights.sum(dim=1)
    if sampling.temperature == 0:
        found = weights.argmax(dim=1, keepdim=True)
        return found[:, 0], -total.log()
    allowed = _allowed(weights, sampling)
    reached = allowed.cumsum(dim=1)
    found = torch.searchsorted(reached, random[:, None] * reached[:, -1:], right=True)
    found.clamp_(max=weights.shape[1] - 1)
    own = allowed.gather(1, found)
    if not bool((own > 0).all()):  # a number that rounds to 1 would take the last token, whatever its weight
        found = torch.where(own > 0, found, allowed.argmax(dim=1, keepdim=True))
        own = allowed.gather(1, found)
    return found[:, 0], own[:, 0].log() - total.log()


def _allowed(weights: Tensor, sampling: Sampling) -> Tensor:
    """The weights [B, V], 0 of tokens that are not drawn from; overwritten."""
    if sampling.top_k is not None and sampling.top_k < weights.shape[1]:
        least = weights.topk(sampling.top_k, dim=1).values[:, -1:]
        weights.masked_fill_(weights < least, 0.0)
    if sampling.top_p < 1:
        ordered, order = weights.sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(dim=1) - ordered
        ordered.masked_fill_(before >= sampling.top_p * ordered.sum(dim=1, keepdim=True), 0.0)
        weights.scatter_(1, order, ordered)
    return weights
