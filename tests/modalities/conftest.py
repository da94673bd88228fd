"""What the tests of several modalities share: a task of a recipe, what a run has left, a run that is stopped.

Those of language and embedding models have their own `recipe_of`, a recipe for a small model.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file

from luthier.common import kinds
from luthier.common.checkpoint import directory
from luthier.common.data.plan import Planned
from luthier.common.data.processing import Batch, PlannedData
from luthier.common.training import curves, data


@pytest.fixture
def task_of(recipe_of) -> Callable[..., SimpleNamespace]:
    """The task of such a recipe, its training examples, and `batch(numbers)`, which joins some of them."""

    def make(*overrides: str, weights: Path | None = None, **options: Any) -> SimpleNamespace:
        recipe = recipe_of(*overrides, **options)
        torch.manual_seed(0)
        task = kinds.task(recipe.task.kind)(recipe, weights)
        collected = data.gather(recipe, task.processing, "train")
        assert collected is not None
        made = PlannedData(task.processing, collected.examples, 0)

        def batch(numbers: Sequence[int]) -> Batch:
            return made[Planned(0, 0, tuple(numbers))]

        return SimpleNamespace(
            recipe=recipe, task=task, examples=collected.examples, report=collected.report, batch=batch
        )

    return make


@pytest.fixture(scope="session")
def left() -> SimpleNamespace:
    """What a run has left: `steps`, the newest checkpoint's `model` folder and `weights`, and `curve(folder, name)`."""

    def checkpoints(folder: Path) -> list[Path]:
        return directory.committed(folder / "checkpoints")

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        files = sorted((checkpoints(folder)[-1] / "model").glob("*model.safetensors"))
        return load_file(files[0])

    def curve(folder: Path, name: str = "train/loss") -> list[tuple[int, str]]:
        found = curves.read(folder / "curves.csv")
        return [(int(row["step"]), row["value"]) for row in found if row["name"] == name]

    return SimpleNamespace(
        checkpoints=checkpoints,
        steps=lambda folder: [directory.step_of(one) for one in checkpoints(folder)],
        model=lambda folder: checkpoints(folder)[-1] / "model",
        weights=weights,
        curve=curve,
        values=lambda folder, name="train/loss": [float(value) for _, value in curve(folder, name)],
    )


class _Stop(Callback):
    def __init__(self, before: int):
        self.before = before

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.before:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="session")
def stop_before() -> Callable[[int], Callback]:
    """`stop_before(number)`: a callback that sends the run SIGTERM, as a cluster does, before this batch of it."""
    return _Stop
