"""Losses of speech recognition, summed and not averaged: the task divides by what a whole optimizer step holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 256
"""Places whose logits are in memory at once."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Summed cross-entropy of the logits `hidden @ weight.T`, which are never in memory all at once.

    With p = softmax(z) and the target q, the gradient of -sum(q log p) with respect to z is p - q, so each chunk's
    gradient is known as soon as its logits are, and is multiplied into those of `hidden` and `weight` there and then
    (as in Hsu et al., Liger Kernel, arXiv:2410.10989).

    Args:
        hidden: [N, D] last hidden states of the places that carry loss.
        weight: [V, D] output layer.
        labels: [N] token ids.
        smoothing: mass e spread evenly: the target is (1 - e) one-hot + e / V (Szegedy et al., arXiv:1512.00567).

    Returns:
        Scalar, in nats, float32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(lower), weight.to(lower)
    with torch.autocast(device, enabled=False):
        total: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, smoothing)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        by_hidden = torch.empty_like(hidden) if needs_hidden else None
        several = not 0 < len(hidden) <= CHUNK
        by_weight = torch.zeros_like(weight) if needs_weight and several else None
        for at in range(0, len(hidden), CHUNK):
            part, wanted = hidden[at : at + CHUNK], labels[at : at + CHUNK, None]
            logits = (part @ weight.T).float()
            log_total = logits.logsumexp(dim=1, keepdim=True)
            total += ((log_total - logits.gather(1, wanted)) * (1 - smoothing)).sum()
            if smoothing:
                total += (log_total - logits.mean(dim=1, keepdim=True)).sum() * smoothing
            if not (needs_hidden or needs_weight):
                continue
            by_logits = logits.sub_(log_total).exp_().sub_(smoothing / logits.shape[1])
            by_logits.scatter_add_(1, wanted, torch.full_like(wanted, smoothing - 1, dtype=by_logits.dtype))
            by_logits = by_logits.to(hidden.dtype)
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[at : at + CHUNK])
            if by_weight is not None:
                by_weight.addmm_(by_logits.T, part)
            elif needs_weight:
                by_weight = by_logits.T @ part
        ctx.gradients = by_hidden, by_weight
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        factor = outputs[0]
        by_hidden, by_weight = ctx.gradients
        if factor != 1:  # as it is, but for loss scaling and weighted sums of losses
            by_hidden = None if by_hidden is None else by_hidden * factor
            by_weight = None if by_weight is None else by_weight * factor
        return by_hidden, by_weight, None, None


def ctc(logits: Tensor, frames: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Summed connectionist temporal classification loss (Graves et al., ICML 2006).

    Args:
        logits: [B, T, V + 1]; the last class is the blank.
        frames: [B] frames of real audio.
        labels: [N] token ids of all examples, one after the other.
        lengths: [B] number of labels of each.

    Returns:
        Scalar, in nats, float32; infinite where an example has fewer frames than its labels need.
    """
    log_probabilities = functional.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    frames = torch.clamp(frames, max=logits.shape[1])
    return functional.ctc_loss(log_probabilities, labels, frames, lengths, blank=logits.shape[-1] - 1, reduction="sum")
