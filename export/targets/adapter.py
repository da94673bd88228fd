"""The adapter alone, for its base model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ...common.errors import ExportError
from ..source import Source

needs_whole = False


def write(source: Source, directory: Path, dtype: str) -> None:
    """Copy the adapter.

    Raises:
        ExportError: the model was trained whole.
    """
    if not source.exportable.adapts:
        raise ExportError("the model was trained whole and has no adapter", where="--to", do="--to merged")
    shutil.copytree(source.model, directory, dirs_exist_ok=True)


def runner(source: Source, directory: Path, dtype: str) -> Any:
    """The base model with the adapter."""
    return source.exportable.load_adapter(directory)
