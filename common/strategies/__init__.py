"""Strategies by name: how the devices of a run share its work; each is a function that returns Lightning's object.

A strategy of ours may have, beside what Lightning asks for:
    gathered(task, to_save)   context in which every rank holds whole weights, for evaluation or for saving
    finish_gradients(...)     in place of `gradients.finish`, where gradients are not plain tensors of the parameters
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy

from ..errors import RecipeError
from ..optim import EIGHT_BIT
from ..recipe import Recipe, TrainSection


def ddp(recipe: Recipe) -> Strategy:
    """A replica on each device; gradients averaged. Unused parameters are an error, as they hide faults."""
    return DDPStrategy(find_unused_parameters=False, gradient_as_bucket_view=True, timeout=timeout(recipe))


def fsdp2(recipe: Recipe) -> Strategy:
    """Weights, gradients and optimizer state cut over all devices (`fully_shard`)."""
    from .sharded import Sharded

    return Sharded(recipe, tensor_parallel=1, timeout=timeout(recipe))


def fsdp2_tp(recipe: Recipe) -> Strategy:
    """As fsdp2, over groups of `train.tensor_parallel` devices that share each layer."""
    from .sharded import Sharded

    return Sharded(recipe, tensor_parallel=recipe.train.tensor_parallel or 1, timeout=timeout(recipe))


def zero(recipe: Recipe) -> Strategy:
    """DeepSpeed's ZeRO."""
    from .deepspeed import strategy

    return strategy(recipe, timeout(recipe))


LATER = 15.0
"""Seconds by which the library's time-out comes after ours, which names the rank that is waited for."""


def timeout(recipe: Recipe) -> timedelta:
    """How long the library lets a rank wait for the others."""
    return timedelta(seconds=recipe.train.timeout + LATER)


def family(name: str) -> str:
    """Strategies of one family read each other's checkpoints: `replicated` (auto, ddp), `fsdp2`, or DeepSpeed's own."""
    return "replicated" if name in ("auto", "ddp") else name.removesuffix("+tp")


def on_cpu(section: TrainSection) -> bool:
    """Whether a training runs on the processor."""
    import torch

    return section.accelerator == "cpu" or not torch.cuda.is_available()


def devices(section: TrainSection) -> int | str:
    """Lightning's `devices`: on CPU `auto` is one process."""
    return 1 if section.devices == "auto" and on_cpu(section) else section.devices


def emulates_bf16(section: TrainSection) -> bool:
    """Whether a training computes in bf16 on an x86 processor that has no units for it: right, and many times slower
    than float32."""
    from ..processor import bf16_units

    return section.precision.startswith("bf16") and on_cpu(section) and bf16_units() is False


def strategy(recipe: Recipe) -> Any:
    """The strategy of a recipe; `auto` is ddp where there is more than one device."""
    section = recipe.train
    if section.strategy == "auto":
        several = section.nodes > 1 or devices(section) not in (1, "auto")
        return ddp(recipe) if several else "auto"
    return _maker(section.strategy)(recipe)


def _maker(name: str) -> Callable[[Recipe], Strategy]:
    return zero if name.startswith("deepspeed") else {"ddp": ddp, "fsdp2": fsdp2, "fsdp2+tp": fsdp2_tp}[name]


def refuse(recipe: Recipe, model: Any = None) -> None:
    """Raise RecipeError if the strategy can't work with this recipe on this machine, with the reason.

    Args:
        recipe: the resolved recipe.
        model: the model, once it is loaded; some reasons show only then.
    """
    section, reason = recipe.train, None
    if section.strategy.startswith("deepspeed"):
        from . import deepspeed

        reason = deepspeed.refuse(recipe)
    elif section.strategy.startswith("fsdp2"):
        from . import sharded

        reason = sharded.refuse(recipe, model)
    elif section.tensor_parallel:
        reason = "train.tensor_parallel needs fsdp2+tp"
    whole = section.strategy in ("auto", "ddp")
    if not whole and getattr(recipe.model, "quantization", "none") != "none":
        reason = "a quantised base can't be cut over devices; use ddp"
    if not whole and recipe.optim.name in EIGHT_BIT:
        reason = f"{recipe.optim.name} can't be cut over devices; use ddp"
    if reason:
        raise RecipeError("the strategy can't work here", where="train.strategy", given=section.strategy, do=reason)
