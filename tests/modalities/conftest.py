"""What the tests of several modalities share: a task of a recipe, what a run has left, a run that is stopped.

Those of language and embedding models have their own `recipe_of`, a recipe for a small model.
"""

from __future__ import annotations

import json
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
from luthier.common.check import check
from luthier.common.checkpoint import directory
from luthier.common.data.plan import Planned
from luthier.common.data.processing import Batch, PlannedData
from luthier.common.errors import LuthierError
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


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`checked(recipe, fast=True)`: what `luthier check` wrote for machines."""

    def run(recipe: Any, fast: bool = True) -> dict[str, Any]:
        file = tmp_path / "check.json"
        passed = check(recipe, fast, file)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        assert found["passed"] == passed
        return found

    return run


@pytest.fixture
def failures(checked) -> Callable[..., list[str]]:
    """`failures(make)`: what the check says against the recipe that `make` gives, or what reading it says."""

    def of(make: Callable[[], Any], fast: bool = True) -> list[str]:
        try:
            recipe = make()
        except LuthierError as error:
            return [error.told]
        answers = [answer for question in checked(recipe, fast)["questions"] for answer in question["answers"]]
        failed = [answer for answer in answers if answer["state"] == "fail"]
        assert all(answer["do"] for answer in failed), "what is to be done is not said"
        return [answer["found"] for answer in failed]

    return of


@pytest.fixture
def finds_nothing(failures) -> Callable[[Any], bool]:
    """Whether the check has nothing against a recipe, but for what it is judged by: small ones are often judged by what
    they are trained on."""

    def of(recipe: Any) -> bool:
        data = recipe.data.model_copy(update={"validation": (), "regression": (), "test": ()})
        assert failures(lambda: recipe.model_copy(update={"data": data})) == []
        return True

    return of


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
