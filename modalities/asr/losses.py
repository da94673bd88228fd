"""Losses of speech recognition, summed and not averaged: the task divides by what a whole optimizer step holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def ctc(logits: Tensor, frames: Tensor, labels: Tensor, lengths: Tensor, blank: int = -1) -> Tensor:
    """Summed connectionist temporal classification loss (Graves et al., ICML 2006).

    Args:
        logits: [B, T, V], one of the classes the blank.
        frames: [B] frames of real audio.
        labels: [N] token ids of all examples, one after the other.
        lengths: [B] number of labels of each.
        blank: class of the blank; -1: the last one.

    Returns:
        Scalar, in nats, float32; infinite where an example has fewer frames than its labels need.
    """
    log_probabilities = functional.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    frames = torch.clamp(frames, max=logits.shape[1])
    blank %= logits.shape[-1]
    return functional.ctc_loss(log_probabilities, labels, frames, lengths, blank=blank, reduction="sum")
