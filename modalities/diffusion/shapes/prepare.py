"""Make what the example needs, once: pictures, and a small pipeline that has learned to draw them."""

from __future__ import annotations

import shutil
from pathlib import Path

from ....common.console import progress
from ....common.once import made_once
from .drawn import make_pictures, words
from .model import make_pipeline

FOLDER = "runs/shapes"  # what the shipped recipes name
VERSION = 2  # raised when pictures or pipeline are made in another way
BASE_RECIPE = "diffusion/shapes-base"


def prepare(folder: str | Path = FOLDER, seed: int = 0) -> bool:
    """Draw pictures and train the small pipeline `model/` on the plain ones, by the recipe `diffusion/shapes-base`.

    Returns:
        whether anything was made: False when all was there already, from this version and seed.
    """
    root = Path(folder)

    def make() -> None:
        make_pictures(root / "pictures", seed)
        with progress("training the autoencoder", "steps") as show:
            make_pipeline(root / "start", words(), seed, told=show)
        train_base(root, seed)

    return made_once(root, {"version": VERSION, "seed": seed}, make)


def train_base(root: Path, seed: int) -> None:
    """Teach the untrained pipeline `start/` to draw; what comes out is `model/`."""
    from ....common.errors import LuthierError
    from ....common.reading import load
    from ....common.training.run import train

    shutil.rmtree(root / "base", ignore_errors=True)
    pictures = root / "pictures"
    places = {
        "model.path": root / "start", "data.train": pictures / "plain", "data.cache.folder": root / "cache",
        "data.validation": pictures / "plain-validation", "output": root / "base", "train.seed": seed,
    }  # fmt: skip
    outcome = train(load(BASE_RECIPE, [f"{key}={value}" for key, value in places.items()]))
    if outcome.stopped_by:
        raise LuthierError("stopped while the small pipeline was trained", do="run the same command again")
    best = (outcome.folder / "checkpoints" / "best" / "model").resolve()
    shutil.rmtree(root / "model", ignore_errors=True)
    shutil.copytree(best, root / "model")
