"""Watching inside a training (`train.debug`): gradients, activations, weights and optimizer state, layer by layer.

`OUTPUT/debug.csv` has the form of the curves, `step,name,value`; a name is `WHAT/MODULE_OR_PARAMETER`, where WHAT is:

    gradient_norm         2-norm of the mean gradient before clipping: the root of their sum of squares is the curve
                          train/gradient_norm
    gradient_zero         share of its elements that are exactly zero
    gradient_nonfinite    share that is nan or infinite
    activation_mean, _std, _largest (absolute), _nonfinite (share)
                          of the first tensor of a module's output, over the step's batches of the first rank, padding
                          included
    weight_norm           2-norm before the step
    update_ratio          2-norm of what the step changed / weight_norm (inf or nan where that is 0)
    KEY_norm              2-norm of a part of the optimizer's state after the step, such as exp_avg and exp_avg_sq

It only reads, so that the training is the same to the last bit, and does nothing on steps that are not due.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..checkpoint.position import Position
from ..recipe import DebugSection, Recipe
from ..task import Task
from .curves import CsvCurves

FILE = "debug.csv"
CHUNK = 2**24
"""Elements of an activation that are looked at together, as some are too large for a copy."""


class Inside(Callback):
    """Writes what happens inside on the steps that are due. Every rank takes part, as tensors may be sharded.

    Goes before `AfterStep` in the list of callbacks, so that a step's rows are there before it is saved.

    Args:
        section: `train.debug`.
        position: where the run stands, kept by `AfterStep`.
        folder: of the run.
        start: optimizer steps done when the run begins.
    """

    def __init__(self, section: DebugSection, position: Position, folder: Path, start: int):
        self.section, self.position = section, position
        self.curves = CsvCurves(folder / FILE, start)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._outputs: dict[str, list[tuple[int, Tensor]]] = {}
        self._gradients: dict[str, tuple[int, Tensor]] = {}
        self._weights: dict[str, Tensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def of(cls, recipe: Recipe, position: Position, folder: Path, start: int) -> list[Callback]:
        """As the recipe asks; empty without `train.debug`."""
        section = recipe.train.debug
        return [] if section is None else [cls(section, position, folder, start)]

    # ------------------------------------------------------------------ Lightning's hooks, in their order

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._due and self.section.activations and trainer.is_global_zero:
            for name, module in _layers(pl_module):
                if self._wanted(name):
                    self._hooks.append(module.register_forward_hook(partial(self._output, name)))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._unhook()  # the backward pass may run layers again (gradient checkpointing)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._due:
            return
        self._optimizer = optimizer
        for name, parameter in self._parameters(pl_module):
            if self.section.gradients and parameter.grad is not None:
                self._gradients[name] = (parameter.grad.numel(), _contents(parameter.grad))
            if self.section.optimizer:  # kept in the host's memory, as the device's may just do for the training
                self._weights[name] = _part(parameter).to("cpu", copy=True)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._optimizer is None:
            return
        assert isinstance(pl_module, Task)
        values = {**self._of_gradients(pl_module.last_step.scale), **_of_outputs(self._outputs)}
        if self.section.optimizer:
            values |= self._of_optimizer(pl_module, self._optimizer)
        self.curves.log_metrics(values, self.position.step + 1)
        self._outputs, self._gradients, self._weights, self._optimizer = {}, {}, {}, None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._unhook()

    # ------------------------------------------------------------------ what is looked at

    @property
    def _due(self) -> bool:
        """Whether the optimizer step that the current batch belongs to is due."""
        return (self.position.step + 1) % self.section.every == 0

    def _wanted(self, name: str) -> bool:
        return re.search(self.section.match, name) is not None

    def _parameters(self, task: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in task.named_parameters():
            if parameter.requires_grad and self._wanted(name):
                yield name, parameter

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def _output(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        tensor = _first(output)
        if tensor is None or not tensor.numel():
            return
        for chunk in _part(tensor).reshape(-1).split(CHUNK):
            wide = chunk.float()
            variance, mean = torch.var_mean(wide, correction=0)
            found = torch.stack([mean, variance, wide.abs().amax(), (~wide.isfinite()).sum()])
            self._outputs.setdefault(name, []).append((chunk.numel(), found))

    # ------------------------------------------------------------------ numbers

    def _of_gradients(self, scale: float) -> dict[str, float]:
        values = {}
        contents = _fetched([found for _, found in self._gradients.values()])
        for (name, (number, _)), (norm, zeros, broken) in zip(self._gradients.items(), contents, strict=True):
            values[f"gradient_norm/{name}"] = norm * scale
            values[f"gradient_zero/{name}"] = zeros / number
            values[f"gradient_nonfinite/{name}"] = broken / number
        return values

    def _of_optimizer(self, task: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters(task):
            before = self._weights[name].to(parameter.device)
            found[f"weight_norm/{name}"] = norm = _norm(before, parameter)
            found[f"update_ratio/{name}"] = _norm(_part(parameter) - before, parameter) / norm
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
                    found[f"{key}_norm/{name}"] = _norm(_part(value), value)
        return dict(zip(found, (value for (value,) in _fetched(list(found.values()))), strict=True))


def _of_outputs(outputs: Mapping[str, Sequence[tuple[int, Tensor]]]) -> dict[str, float]:
    """The statistics of each module's outputs over all its calls in the step."""
    values = {}
    for name, parts in outputs.items():
        numbers = [number for number, _ in parts]
        found, total = _fetched([part for _, part in parts]), sum(numbers)
        mean = sum(n * part[0] for n, part in zip(numbers, found, strict=True)) / total
        square = sum(n * (part[1] + (part[0] - mean) ** 2) for n, part in zip(numbers, found, strict=True)) / total
        values[f"activation_mean/{name}"] = mean
        values[f"activation_std/{name}"] = math.sqrt(square) if square >= 0 else math.nan
        values[f"activation_largest/{name}"] = float(torch.tensor([part[2] for part in found]).max())  # keeps a nan
        values[f"activation_nonfinite/{name}"] = sum(part[3] for part in found) / total
    return values


def _layers(task: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules without children, and the members of module lists, which are the layers of a model."""
    listed = {
        id(child) for module in task.modules() if isinstance(module, nn.ModuleList) for child in module.children()
    }
    for name, module in task.named_modules():
        if id(module) in listed or not any(True for _ in module.children()):
            yield name, module


def _first(output: Any) -> Tensor | None:
    """The first tensor of floating-point numbers in a module's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return next((tensor for tensor in map(_first, values) if tensor is not None), None)


# ---------------------------------------------------------------------------------------------- sharded tensors


def _part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: of a DTensor its part, else all."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _summed(values: Tensor, like: Tensor) -> Tensor:
    """The sum of values over the ranks among which `like` is cut; called on all of them."""
    if not isinstance(like, DTensor):
        return values
    places = [Replicate() if place.is_replicate() else Partial() for place in like.placements]
    return DTensor.from_local(values, like.device_mesh, places).full_tensor()


def _norm(part: Tensor, like: Tensor) -> Tensor:
    """[1] 2-norm of a tensor that is cut as `like` is, from this rank's part of it."""
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))[None]
    if isinstance(like, DTensor):
        norm = _summed(norm.double().square(), like).sqrt()
    return norm.float()


@torch.no_grad()
def _contents(tensor: Tensor) -> Tensor:
    """[3] 2-norm, number of zeros, number of nan and infinite elements."""
    if isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements):
        tensor = tensor.full_tensor()  # its parts are not pieces but terms
    part = _part(tensor)
    counts = torch.stack([(part == 0).sum(), (~part.isfinite()).sum()])
    return torch.cat([_norm(part, tensor), _summed(counts, tensor).float()])


def _fetched(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The values of small tensors of one length, fetched from the device together."""
    found: list[list[float]] = torch.stack(list(tensors)).tolist() if tensors else []
    return found
