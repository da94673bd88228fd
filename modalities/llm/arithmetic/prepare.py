"""Make what the exercise needs, once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ....common.once import made_once
from .mistakes import make_mistakes
from .model import make_model
from .pairs import make_pairs
from .sums import make_sums, words

FOLDER = "runs/arithmetic"  # what the shipped recipes name
FINE_TUNED = "half/checkpoints/best"  # of these, what a first one that was stopped early leaves
VERSION = 4  # raised when the dialogues, the pairs or the model are made in another way


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Make dialogues and a small untrained Llama: `sums/{train,validation,test,further}.jsonl` and `model/` under the
    folder; pairs of answers to evaluate on, `pairs/{validation,test}.jsonl`; and, once a model was fine-tuned on
    `train`, the mistakes that it makes in `further`, `pairs/train.jsonl`.

    Returns:
        whether anything was made: False when all was there already, from this version, seed and model.
    """
    root = Path(folder)

    def make() -> None:
        make_sums(root / "sums", seed)
        make_pairs(root / "sums", root / "pairs", seed)
        make_model(root / "model", words(), seed)

    settings: dict[str, object] = {"version": VERSION, "seed": seed}
    made = made_once(root, settings, make)
    model = fine_tuned(root)
    if model is None:
        return made
    weights = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    dialogues, file = root / "sums" / "further.jsonl", root / "pairs" / "train.jsonl"
    return (
        made_once(
            root / "pairs", {**settings, "model": weights}, lambda: make_mistakes(model, dialogues, file, seed=seed)
        )
        or made
    )


def fine_tuned(folder: str | Path) -> Path | None:
    """The model of a run in the folder that was trained on the folder's dialogues; None: there is none yet. One that
    was trained on others may have seen the sums that the evaluation asks for."""
    root = Path(folder)
    record = root / FINE_TUNED / "run.json"
    if not record.is_file():
        return None
    known = json.loads(record.read_text(encoding="utf-8"))["data"]["train"]["sha256"]
    train = hashlib.sha256((root / "sums" / "train.jsonl").read_bytes()).hexdigest()
    return root / FINE_TUNED / "model" if set(known.values()) == {train} else None
