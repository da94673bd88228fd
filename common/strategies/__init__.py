"""Strategies by name; each is a small function that returns what Lightning's Trainer takes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy

from ..recipe import TrainSection


def ddp() -> Strategy:
    """A replica on each device; gradients averaged. Unused parameters are an error, as they hide faults."""
    return DDPStrategy(find_unused_parameters=False, gradient_as_bucket_view=True)


def devices(section: TrainSection) -> int | str:
    """Lightning's `devices`: on CPU `auto` is one process."""
    import torch

    on_cpu = section.accelerator == "cpu" or (section.accelerator == "auto" and not torch.cuda.is_available())
    return 1 if section.devices == "auto" and on_cpu else section.devices


def strategy(section: TrainSection) -> Any:
    """The strategy of a recipe; `auto` is ddp where there is more than one device."""
    several = section.nodes > 1 or devices(section) not in (1, "auto")
    return ddp() if section.strategy == "ddp" or several else "auto"
