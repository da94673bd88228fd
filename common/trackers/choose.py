"""From the names in a recipe to loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from ..errors import missing_extra
from ..recipe import Recipe
from ..training.curves import CsvCurves


def loggers(recipe: Recipe, output: Path, start: int) -> list[Logger]:
    """The loggers of a run; csv always.

    Args:
        recipe: names them.
        output: folder of the run.
        start: optimizer steps done when the run begins.

    Raises:
        LuthierError: a package is missing; it names the extra that brings it.
    """
    section = recipe.track
    others = [name for name in dict.fromkeys(section.loggers) if name != "csv"]
    return [CsvCurves(output / "curves.csv", start), *(_made(name, output, start, section) for name in others)]


def _made(name: str, output: Path, start: int, section: Any) -> Logger:
    called = section.name or "/".join(output.parts[-2:])
    try:
        if name == "tensorboard":
            from .services import TensorBoard

            return TensorBoard(output, start)
        if name == "mlflow":
            from .services import Mlflow

            return Mlflow(output, section.project, called, section.uri)
        if name == "wandb":
            from .services import Wandb

            return Wandb(output, section.project, called)
        if name == "swanlab":
            from .swan import SwanLab

            found: Logger = SwanLab(output, section.project, called)
            return found
        from .trackio_logger import Trackio

        return Trackio(output, section.project, called)
    except ModuleNotFoundError as error:
        raise missing_extra(name, EXTRAS.get(name, name)) from error


EXTRAS = {"tensorboard": "track", "mlflow": "track"}
"""Extras that are not called as their trackers are."""
