"""Which noise level each picture is trained at. A level is a share of all in [0, 1]; 1 is pure noise."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .sections import TimestepSection


def drawn(number: int, section: TimestepSection, device: torch.device | None = None) -> Tensor:
    """Levels [B] in [0, 1), drawn from torch's global generator (Esser et al., arXiv:2403.03206, section 3.1).

    Args:
        number: B.
        section: the density, and the range that it is brought to.
        device: of the result.
    """
    if section.sampling == "logit_normal":
        levels = torch.sigmoid(section.mean + section.std * torch.randn(number, device=device))
    else:
        levels = torch.rand(number, device=device)
    if section.sampling == "mode":
        levels = 1 - levels - section.mode_scale * (torch.cos(math.pi * levels / 2).square() - 1 + levels)
    low, high = section.range
    return low + (high - low) * levels.clamp(0, 1 - 1e-6)


def steps(levels: Tensor, number: int) -> Tensor:
    """Discrete steps [B], int, of a schedule of so many steps, for levels in [0, 1)."""
    return (levels * number).long().clamp(0, number - 1)


def shifted(levels: Tensor, shift: float) -> Tensor:
    """s x / (1 + (s - 1) x): levels moved towards more noise for s > 1, as larger pictures need."""
    return shift * levels / (1 + (shift - 1) * levels)


def scheduler_shift(config: Any, tokens: int) -> float:
    """The shift s of a flow-matching scheduler's config.

    With `use_dynamic_shifting` it is exp(mu), where mu grows linearly with the number of tokens (diffusers'
    `calculate_shift`); else the config's own.

    Args:
        config: of diffusers' FlowMatchEulerDiscreteScheduler, as a mapping.
        tokens: of the picture, after patching.
    """
    if not config.get("use_dynamic_shifting", False):
        return float(config.get("shift", 1.0))
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    return math.exp(low + (high - low) * (tokens - fewest) / (most - fewest))


def fixed(number: int) -> Tensor:
    """Levels for evaluation [K]: the middles of K equal parts of [0, 1]."""
    return (torch.arange(number) + 0.5) / number
