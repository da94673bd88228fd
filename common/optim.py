"""Optimizers and schedules by name, with the parameter groups that the field uses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .errors import CheckpointError, ModelError, missing_extra
from .recipe import OptimSection

if TYPE_CHECKING:
    from .task import Task

EIGHT_BIT = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
"""bitsandbytes' optimizers that keep their state in 8 bits."""

DECAY_SHARE = 0.2
"""Last part of a `wsd` schedule, in which the rate falls."""


def groups(module: nn.Module, section: OptimSection) -> list[dict[str, Any]]:
    """Parameter groups: by the recipe's patterns, and without weight decay for biases, norms and other vectors."""
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        at = next((i for i, group in enumerate(section.groups) if re.search(group.match, name)), -1)
        custom = section.groups[at] if at >= 0 else None
        decays = parameter.ndim > 1
        decay = section.weight_decay if custom is None or custom.weight_decay is None else custom.weight_decay
        group = found.setdefault(
            (at, decays),
            {
                "params": [],
                "lr": section.learning_rate if custom is None or custom.learning_rate is None else custom.learning_rate,
                "weight_decay": decay if decays else 0.0,
            },
        )
        group["params"].append(parameter)
    if not found:
        raise ModelError("nothing to train: every parameter is frozen", where="model")
    return list(found.values())


def optimizer(module: nn.Module, section: OptimSection, fused: bool = True) -> torch.optim.Optimizer:
    """The optimizer of the recipe over the trained parameters of a module.

    Args:
        fused: use the fused kernel; not with scaled gradients, which it unscales by itself only after the clipping.
    """
    parameters = groups(module, section)
    if section.name == "sgd":
        return torch.optim.SGD(parameters, lr=section.learning_rate, momentum=section.momentum)
    if section.name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=section.learning_rate)
    if section.name in EIGHT_BIT:
        return _eight_bit(section, parameters)
    return torch.optim.AdamW(
        parameters, lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=fused or None
    )


def _eight_bit(section: OptimSection, parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        from bitsandbytes import optim as eight_bit
    except ImportError as error:
        raise missing_extra("bitsandbytes", "quantized") from error
    kind = getattr(eight_bit, EIGHT_BIT[section.name])
    made: torch.optim.Optimizer = kind(parameters, lr=section.learning_rate, betas=section.betas, eps=section.eps)
    return made


def factor(section: OptimSection, step: int, total: int) -> float:
    """Learning rate at optimizer step `step` (from 0) of `total`, as a share of the peak."""
    warmup = round(section.warmup * total) if section.warmup < 1 else int(section.warmup)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    rest = max(1, total - warmup)
    done = min(1.0, (step - warmup) / rest)
    if section.schedule == "constant":
        return 1.0
    if section.schedule == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / max(1, warmup, step + 1))
    if section.schedule == "cosine":
        share = (1 + math.cos(math.pi * done)) / 2
    elif section.schedule == "wsd":
        share = min(1.0, (1 - done) / DECAY_SHARE)
    else:
        share = 1 - done
    return section.final + (1 - section.final) * share


def schedule(optimizer: torch.optim.Optimizer, section: OptimSection, total: int) -> LambdaLR:
    """The schedule of the recipe over `total` optimizer steps."""
    return LambdaLR(optimizer, lambda step: factor(section, step, total))


def check_names(task: Task, saved: Mapping[str, Any] | Iterable[str]) -> None:
    """Raise if the names in a checkpoint are not those that this task trains."""
    here, there = task.trained_names(), set(saved)
    if here != there:
        raise CheckpointError(
            "the checkpoint's parameters are not those of this recipe",
            given=f"only in the checkpoint: {sorted(there - here)[:3]}; only here: {sorted(here - there)[:3]}",
            do="resume with the recipe that was saved in the checkpoint",
        )
