"""The folder of a run: made, resumed or refused, and never overwritten."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint import directory
from ..console import is_first_rank
from ..errors import CheckpointError, LuthierError, RecipeError
from ..recipe import Recipe

RECIPE, CHECKPOINTS = "recipe.yaml", "checkpoints"
CHOSEN = "LUTHIER_OUTPUT"
"""Set for the processes of one run, so that all use the folder that the first has chosen."""

FREE = (
    "output", "train.fresh", "train.devices", "train.nodes", "train.accelerator", "train.accumulate", "train.threads",
    "train.log_every", "train.max_skipped", "data.workers", "data.max_bad", "data.test", "evaluate", "checkpoint",
    "track",
)  # fmt: skip
"""Keys that may differ when a run is resumed: they don't change what is trained."""


@dataclass(frozen=True)
class Output:
    """Where a run writes, and the checkpoint that it goes on from (None: from the start)."""

    folder: Path
    checkpoint: Path | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def position(self) -> dict[str, Any] | None:
        """Where the run stood at its checkpoint."""
        if self.checkpoint is None:
            return None
        found: dict[str, Any] = json.loads((self.checkpoint / "run.json").read_text(encoding="utf-8"))["position"]
        return found


def choose(recipe: Recipe) -> Path:
    """The folder that the recipe means: `output`, or with `train.fresh` the first free of output-2, output-3, ..."""
    if chosen := os.environ.get(CHOSEN):
        return Path(chosen)
    folder = Path(recipe.output).expanduser().absolute()
    if recipe.train.fresh and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(
            "several processes started from outside can't agree on a new folder",
            where="train.fresh",
            do="set another output instead",
        )
    number = 2
    while recipe.train.fresh and folder.exists() and any(folder.iterdir()):
        folder = Path(f"{Path(recipe.output).expanduser().absolute()}-{number}")
        number += 1
    os.environ[CHOSEN] = str(folder)
    return folder


@contextmanager
def opened(recipe: Recipe) -> Iterator[Output]:
    """The run's folder, locked against a second run.

    Raises:
        RecipeError: the folder holds something else, or a run of another recipe.
        CheckpointError: it holds checkpoints and none is whole.
        LuthierError: another run is writing there.
    """
    folder = choose(recipe)
    try:
        if is_first_rank():  # the others only read; they may start before, with or after it
            _claim(recipe, folder)
        with _locked(folder):
            if is_first_rank():
                directory.clear_partial(folder / CHECKPOINTS)
            yield Output(folder, directory.newest_valid(folder / CHECKPOINTS, mend=is_first_rank()))
    finally:
        os.environ.pop(CHOSEN, None)


def _claim(recipe: Recipe, folder: Path) -> None:
    """Make the folder a run's, or make sure that it is this run's."""
    file = folder / RECIPE
    try:
        written = file.with_name(f".{RECIPE}.new")
        if folder.exists() and any(path != written for path in folder.iterdir()):
            if not file.is_file():
                raise RecipeError(
                    "the folder is not empty and holds no run", where="output", given=folder, do="give another folder"
                )
            _same_training(recipe, folder)
            (folder / CHECKPOINTS).mkdir(exist_ok=True)
            return
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(settled(recipe, folder).dump(), encoding="utf-8")
        written.replace(file)  # before anything else: what holds a recipe is a run
        (folder / CHECKPOINTS).mkdir()
    except OSError as error:
        raise RecipeError(f"the folder can't be used: {error.strerror}", where="output", given=folder) from error


def settled(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe of the run in `folder`: repeating it is resuming it."""
    train = recipe.train.model_copy(update={"fresh": False})
    return recipe.model_copy(update={"output": str(folder), "train": train})


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if not is_first_rank():
        yield
        return
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LuthierError(
                "another run is writing to this output", where=folder, do="wait for it, or give another output"
            ) from None
        yield


def _same_training(recipe: Recipe, folder: Path) -> None:
    """Raise if the folder's run trains something else than this recipe."""
    saved = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    here, there = _leaves(recipe.model_dump(mode="json")), _leaves(saved)
    changed = [
        f"{key}: {there.get(key)!r} -> {here.get(key)!r}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key) and not any(key == free or key.startswith(free + ".") for free in FREE)
    ]
    if changed:
        raise CheckpointError(
            "the folder holds a run of another recipe; resuming it would change what is trained",
            where=folder,
            given="\n            ".join(changed[:8]),
            do="set another output, or train.fresh=true for a new folder beside it",
        )


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {k: v for name, value in tree.items() for k, v in _leaves(value, f"{path}.{name}".lstrip(".")).items()}
    return {path: tree}
