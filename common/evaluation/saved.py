"""Evaluation from a checkpoint alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import kinds
from ..checkpoint import directory
from ..console import progress
from ..errors import RecipeError
from ..reading import load
from ..recipe import Recipe
from ..task import Task
from ..training import data
from ..training.run import set_threads
from .run import Evaluation, evaluate

CHANGEABLE = ("data", "evaluate", "train.threads", "train.accelerator", "train.precision")
"""Keys that an evaluation may override; the others describe the model that was trained."""


def evaluate_checkpoint(folder: Path, suite: str = "validation", overrides: Sequence[str] = ()) -> Evaluation:
    """Load a checkpoint's model and evaluate it, by the recipe inside the checkpoint.

    Args:
        folder: the checkpoint.
        suite: `validation`, `regression` or `test`: which data of the recipe.
        overrides: `key=value` changes of data and evaluation settings.

    Raises:
        CheckpointError: the checkpoint is not whole.
        RecipeError: there is no such data, or an override is not about the evaluation.
    """
    folder = Path(os.path.realpath(folder))  # `best` is a link
    directory.verify(folder)
    for text in overrides:
        if not text.startswith(tuple(f"{key}{end}" for key in CHANGEABLE for end in (".", "="))):
            raise RecipeError(
                "an evaluation can't change this", given=text, expected=f"keys of {', '.join(CHANGEABLE)}"
            )
    recipe = load(folder / "recipe.yaml", overrides)
    return evaluate_recipe(recipe, suite, folder / "model")


def evaluate_recipe(recipe: Recipe, suite: str, weights: Path | None = None) -> Evaluation:
    """Evaluate the model of a recipe as it is before training, or with the weights that a checkpoint saved."""
    kind = kinds.task(recipe.task.kind)
    set_threads(recipe)
    collected = data.gather(recipe, kind.make_processing(recipe, weights), suite)
    if collected is None:
        raise RecipeError("the recipe names no data for this", where=f"data.{suite}", do="add data=FILE to the command")
    task: Task = kind(recipe, weights)
    task.to(device(recipe))
    with progress("evaluating", "batches") as show:
        return evaluate(task, collected, recipe, workers=data.workers(recipe), progress=show)


def device(recipe: Recipe) -> torch.device:
    """The device of a single-process run."""
    wanted = recipe.train.accelerator
    if wanted in ("auto", "gpu") and torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps") if wanted == "mps" else torch.device("cpu")
