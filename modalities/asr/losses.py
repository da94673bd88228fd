"""Losses of speech recognition, summed and not averaged: the task divides by what a whole optimizer step holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Summed cross-entropy.

    Args:
        logits: [N, V] of the places that carry loss.
        labels: [N] token ids.
        smoothing: mass e spread evenly: the target is (1 - e) one-hot + e / V (Szegedy et al., arXiv:1512.00567).

    Returns:
        Scalar, in nats, float32.
    """
    return functional.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=smoothing)


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
