"""Make what the exercise needs, once."""

from __future__ import annotations

from pathlib import Path

from ....common.once import made_once
from .model import make_model
from .pairs import make_pairs
from .sums import make_sums, words

FOLDER = "runs/arithmetic"  # what the shipped recipe names
VERSION = 2  # raised when the dialogues or the model are made in another way


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Make dialogues, pairs of answers and a small untrained Llama: `sums/{train,validation,test}.jsonl`, the same
    under `pairs/`, and `model/` under the folder.

    Returns:
        whether anything was made: False when all was there already, from this version and seed.
    """
    root = Path(folder)

    def make() -> None:
        make_sums(root / "sums", seed)
        make_pairs(root / "sums", root / "pairs", seed)
        make_model(root / "model", words(), seed)

    return made_once(root, {"version": VERSION, "seed": seed}, make)
