"""The adapter of an image model in the form of kohya's scripts, which ComfyUI and others read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ...common.errors import ExportError
from ..source import Source

needs_whole = False
FILE, WORDS = "adapter.safetensors", "embeddings"


def write(source: Source, directory: Path, dtype: str) -> None:
    """Convert the adapter; new words stay as they are, as these programs read them from files of their own.

    Raises:
        ExportError: the model was trained whole, or its adapter is of a kind that this form does not know.
    """
    if not source.exportable.adapts:
        raise ExportError("the model was trained whole and has no adapter", where="--to", do="--to merged")
    source.exportable.write_kohya(source.model, directory / FILE)
    if (source.model / WORDS).is_dir():
        shutil.copytree(source.model / WORDS, directory / WORDS)


def runner(source: Source, directory: Path, dtype: str) -> Any:
    """The base pipeline with the adapter."""
    return source.exportable.load_adapter(directory)
