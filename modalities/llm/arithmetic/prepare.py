"""Make what the exercise needs, once."""

from __future__ import annotations

import json
from pathlib import Path

from .model import make_model
from .sums import make_sums, words

FOLDER = "runs/arithmetic"  # what the shipped recipe names
VERSION = 1  # raised when the dialogues or the model are made in another way


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Make dialogues and a small untrained Llama: `sums/{train,validation,test}.jsonl` and `model/` under the folder.

    Returns:
        whether anything was made: False when all was there already, from this version and seed.
    """
    root = Path(folder)
    marker, settings = root / "prepared.json", {"version": VERSION, "seed": seed}
    if _read(marker) == settings:
        return False
    marker.unlink(missing_ok=True)
    make_sums(root / "sums", seed)
    make_model(root / "model", words(), seed)
    marker.write_text(json.dumps(settings), encoding="utf-8")
    return True


def _read(marker: Path) -> object:
    try:
        return json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
