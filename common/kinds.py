"""From a task kind to its code: `asr.whisper` is the folder `modalities/asr/whisper/`, with no registry to edit.

Such a folder holds `config.py` with the class `Config` (light to import) and `task.py` with the class `Task`.
Outside packages join through the entry-point group `luthier.tasks`: name = kind, value = the module of such a folder.
A modality that has verbs of its own holds `verbs.py` (light to import) with the function `register(app)`; so do the
folders beside the core (export, migrate, ...).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .errors import missing_extra

if TYPE_CHECKING:
    from .recipe import Recipe
    from .task import Task

PACKAGE = __package__.rpartition(".")[0]


@cache
def modules() -> dict[str, str]:
    """Every known kind and the name of its module."""
    from importlib.metadata import entry_points

    root = Path(__file__).parent.parent / "modalities"
    folders = [file.parent for file in sorted(root.glob("*/*/config.py"))]
    kinds = [f"{folder.parent.name}.{folder.name}" for folder in folders]
    found = {kind: f"{PACKAGE}.modalities.{kind}" for kind in kinds}
    return found | {point.name: point.value for point in entry_points(group="luthier.tasks")}


def names() -> list[str]:
    return sorted(modules())


def verbs() -> list[ModuleType]:
    """The modules of the modalities' own verbs, and of what is beside the core."""
    root = Path(__file__).parent.parent
    files = sorted([*root.glob("modalities/*/verbs.py"), *root.glob("*/verbs.py")])
    return [import_module(".".join((PACKAGE, *file.relative_to(root).with_suffix("").parts))) for file in files]


def config(kind: str) -> type[Recipe]:
    """The recipe class of a kind. Raises KeyError if there is none."""
    found: type[Recipe] = import_module(f"{modules()[kind]}.config").Config
    return found


def task(kind: str) -> type[Task]:
    """The Task class of a kind; a library that is missing is named together with the extra that brings it."""
    try:
        found: type[Task] = import_module(f"{modules()[kind]}.task").Task
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == PACKAGE:
            raise
        raise missing_extra(error.name or str(error), kind.split(".")[0]) from error
    return found
