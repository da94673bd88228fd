"""Samples on disk: what is text goes into JSON, a picture into a file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..record import write_json


def keep(samples: Sequence[Mapping[str, Any]], folder: Path, name: str) -> None:
    """Write samples to `folder/name.json`. A value of bytes is a PNG file: it becomes `folder/name-3.png`, and its path
    relative to the folder stands in its place.

    Args:
        samples: of an evaluation.
        folder: made if absent.
        name: of the evaluation.
    """
    folder.mkdir(exist_ok=True)
    written: list[dict[str, Any]] = []
    for number, sample in enumerate(samples):
        written.append({})
        for key, value in sample.items():
            if isinstance(value, bytes):
                file = f"{name}-{number}.png"
                (folder / file).write_bytes(value)
                value = file
            written[-1][key] = value
    write_json(folder / f"{name}.json", written)
