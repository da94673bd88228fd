"""Memory of one device by part, for each way of sharing the work, and settings that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..recipe import OptimSection
from .step import Step

CUT: dict[str, tuple[str, ...]] = {
    "auto": (),
    "ddp": (),
    "fsdp2": ("weights", "gradients", "optimizer"),
    "fsdp2+tp": ("weights", "gradients", "optimizer"),
    "deepspeed_zero1": ("optimizer",),
    "deepspeed_zero2": ("gradients", "optimizer"),
    "deepspeed_zero3": ("weights", "gradients", "optimizer"),
}
"""What each strategy cuts over the devices; with `_offload` the optimizer's state lies in the host's memory."""

DIVIDED = (1, 2, 4, 8, 16, 32, 64)
"""By which a batch is divided to fit, with as many more accumulated."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Args:
        weights, gradients, optimizer: of the model.
        activations: what the forward pass keeps for the backward pass.
        step: gradients, activations and what operations need, at most at once: as the ones grow the others go.
        rollouts: keys and values while the model writes its own examples; not at the same time as a step.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    step: int
    rollouts: int = 0

    @property
    def total(self) -> int:
        """Most at once."""
        return self.weights + self.optimizer + max(self.step, self.gradients, self.rollouts)

    def divided(self, number: int) -> Memory:
        """With a batch so many times smaller."""
        beside = max(0, self.step - self.gradients) // number
        return replace(self, activations=self.activations // number, step=self.gradients + beside)


def moments(section: OptimSection, step: Step) -> int:
    """Bytes of an optimizer's state."""
    each = {"adamw": 2.0, "adamw_8bit": 0.51, "paged_adamw_8bit": 0.51, "adafactor": 0.02}
    if section.name == "sgd":
        return step.gradients if section.momentum else 0
    share = each[section.name]
    return int(step.gradients * share if share >= 1 else step.trained * 4 * share)


def of(step: Step, section: OptimSection, strategy: str, devices: int) -> Memory:
    """Memory of one of some devices."""
    offload = strategy.endswith("_offload")
    cut = CUT[strategy.removesuffix("_offload")] if devices > 1 else ()
    part = {name: devices if name in cut else 1 for name in ("weights", "gradients", "optimizer")}
    gradients = step.gradients // part["gradients"]
    most = step.peak - step.gradients + gradients
    if "weights" in cut:
        most += 2 * step.layer  # a layer put together, and the next one on its way
    elif devices > 1:
        most += gradients  # the buckets in which they are sent
    return Memory(
        step.weights // part["weights"],
        gradients,
        0 if offload else moments(section, step) // part["optimizer"],
        step.held,
        max(most, gradients),
        step.cache,
    )


def fitting(plain: Memory, checkpointed: Memory, room: float, has: bool) -> str | None:
    """The mildest change of a recipe that fits: activation checkpointing, then smaller batches; None: none does.

    Args:
        plain, checkpointed: without and with activation checkpointing.
        room: bytes.
        has: whether the recipe has it.
    """
    for checkpointing, number, memory in _options(plain, checkpointed, has):
        if memory.total <= room:
            changes = [] if checkpointing == has else ["train.gradient_checkpointing=true"]
            if number > 1:
                changes.append(f"data.batch divided by {number}, train.accumulate times {number}")
            return ", ".join(changes) or "as it is"
    return None


def _options(plain: Memory, checkpointed: Memory, has: bool) -> Iterator[tuple[bool, int, Memory]]:
    for number in DIVIDED:
        for checkpointing in (True,) if has else (False, True):
            yield checkpointing, number, (checkpointed if checkpointing else plain).divided(number)
