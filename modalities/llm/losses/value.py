"""The loss of a critic."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of what was expected, of one shape; the larger of that and the error of values that are
    kept within `clip` of the old ones, if that is given (as OpenAI's implementation of PPO has it, Schulman et al.,
    arXiv:1707.06347; for language models Stiennon et al., arXiv:2009.01325, and TRL's PPOTrainer).

    Args:
        values: with gradient.
        old: when the rollout was drawn.
        returns: advantages + old values.
        clip: None: not clipped.
    """
    error = (values - returns).square()
    if clip is not None:
        bounded = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - returns).square())
    return error / 2
