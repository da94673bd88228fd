"""One training step of a recipe, run dry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..check.subject import Subject, largest
from ..evaluation.run import autocast
from ..quantized import BYTES
from ..recipe import Recipe
from ..task import Task
from .dry import Dry
from .hollow import hollow


@dataclass(frozen=True)
class Step:
    """What a forward and backward pass of the largest batch takes.

    Args:
        parameters, trained: numbers of them.
        weights, gradients: bytes.
        layer: bytes of the largest of the layers that are cut over devices one by one.
        held: bytes that the forward pass keeps for the backward pass.
        peak: bytes in use at most beside the weights, gradients included.
        forward, backward: floating-point operations.
        cost: of the batch, padding included, in the modality's unit.
        examples: in the batch.
        cache: bytes of keys and values while the model writes its own examples.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    layer: int
    held: int
    peak: int
    forward: int
    backward: int
    cost: float
    examples: int
    cache: int


def dry_step(subject: Subject, checkpointing: bool | None = None) -> Step:
    """Run the largest batch through the model of a recipe, made without weights, twice where batches are accumulated.

    Args:
        subject: with its data path and plan.
        checkpointing: in place of `train.gradient_checkpointing`.
    """
    recipe = subject.recipe
    if checkpointing is not None:
        section = recipe.train.model_copy(update={"gradient_checkpointing": checkpointing})
        recipe = recipe.model_copy(update={"train": section})
    with hollow() as made:
        with Dry():
            task = made.empty(subject.kind(recipe))
        task.train_mode()
        assert subject.plan is not None
        batch = subject.batch(largest(subject.plan))
        if batch.data is None:
            raise batch.bad[0]
        dry = Dry(made.alive())
        with dry:
            held = _pass(task, task.imagined(batch.data), dry)
            if recipe.train.accumulate > 1:  # now the gradients of the first are there too
                _pass(task, task.imagined(batch.data), dry)
        times = min(2, recipe.train.accumulate)
        trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        return Step(
            sum(tensor.numel() for tensor in made.alive() if isinstance(tensor, nn.Parameter)),
            sum(parameter.numel() for parameter in trained),
            sum(_bytes(tensor, recipe) for tensor in made.alive()),
            sum(parameter.numel() * parameter.element_size() for parameter in trained),
            _layer(task),
            held,
            dry.peak,
            dry.flops["forward"] // times,
            dry.flops["backward"] // times,
            batch.padded,
            len(batch.indices),
            task.held_in_rollouts(batch.data),
        )


def _pass(task: Task, data: Any, dry: Dry) -> int:
    """Forward and backward; bytes in use between them."""
    dry.phase = "forward"
    with autocast(task.recipe.train.precision, torch.device("cpu")):
        loss = task.loss(data).sum
    held = dry.live
    dry.phase = "backward"
    loss.backward()
    return held


def _bytes(tensor: torch.Tensor, recipe: Recipe) -> int:
    quantised = getattr(recipe.model, "quantization", "none") != "none" and tensor.ndim == 2
    size = BYTES if quantised and not tensor.requires_grad else tensor.element_size()
    return int(tensor.numel() * size)


def _layer(task: Task) -> int:
    """Bytes of the largest member of a list of layers."""
    lists = [module for module in task.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layers in lists for layer in layers]
    return max(sizes, default=0)
