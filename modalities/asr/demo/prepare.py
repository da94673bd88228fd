"""Make what the demonstration needs, once."""

from __future__ import annotations

import json
from pathlib import Path

from .model import make_model
from .speech import make_speech, sentences

FOLDER = "runs/demo"  # what the shipped recipe names
VERSION = 3  # raised when the speech or the model is made in another way


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Make speech and a small untrained Whisper: `speech/{train,validation,test}.jsonl` and `model/` under the folder.

    Returns:
        whether anything was made: False when all was there already, from this version and seed.
    """
    root = Path(folder)
    marker, settings = root / "prepared.json", {"version": VERSION, "seed": seed}
    if _read(marker) == settings:
        return False
    marker.unlink(missing_ok=True)
    make_speech(root / "speech", seed)
    make_model(root / "model", sentences(), seed)
    marker.write_text(json.dumps(settings), encoding="utf-8")
    return True


def _read(marker: Path) -> object:
    try:
        return json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
