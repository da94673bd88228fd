"""An artifact on disk: whole or absent, and named unusable if it is not what was trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common.checkpoint.directory import sha256
from ..common.errors import ExportError
from ..common.record import write_json

PARITY, CARD, ARTIFACT = "parity.json", "README.md", "artifact.json"
PARTIAL, UNUSABLE = ".tmp", ".unusable"


def refuse(target: Path) -> None:
    """Raise ExportError if something is there already: nothing is overwritten."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError("there is something already", where=target, do="give another --output")


@contextmanager
def partial(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` to write into; it is gone afterwards, whatever happens, unless it was renamed."""
    folder = target.with_name(target.name + PARTIAL)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write `artifact.json`: what it is, and each file with its size and SHA-256."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listing = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)} for path in files
    }
    write_json(folder / ARTIFACT, {**facts, "files": listing})


def publish(folder: Path, target: Path) -> Path:
    """Rename a finished folder into place."""
    if target.exists():
        target.rmdir()  # empty, as `refuse` has seen
    return folder.rename(target)


def set_aside(folder: Path, target: Path) -> Path:
    """Rename a folder that failed, so that nobody serves it by its name."""
    place, number = target.with_name(target.name + UNUSABLE), 2
    while place.exists():
        place, number = target.with_name(f"{target.name}{UNUSABLE}-{number}"), number + 1
    return folder.rename(place)
