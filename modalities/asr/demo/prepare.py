"""Make what the demonstration needs, once."""

from __future__ import annotations

from pathlib import Path

from ....common.once import made_once
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

    def make() -> None:
        make_speech(root / "speech", seed)
        make_model(root / "model", sentences(), seed)

    return made_once(root, {"version": VERSION, "seed": seed}, make)
