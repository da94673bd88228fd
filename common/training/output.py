"""The folder of a run: made, resumed or refused, and never overwritten."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint import directory
from ..errors import CheckpointError, LuthierError, RecipeError
from ..recipe import Recipe
from ..strategies import family
from .ranks import CHOSEN as CHOSEN
from .ranks import agree

RECIPE, CHECKPOINTS, RANKS = "recipe.yaml", "checkpoints", ".ranks"

FREE = (
    "output", "train.fresh", "train.devices", "train.nodes", "train.accelerator", "train.accumulate", "train.threads",
    "train.tensor_parallel", "train.timeout", "train.requeue", "train.debug", "train.spike_factor", "train.on_spike",
    "train.log_every", "train.max_skipped", "data.workers", "data.max_bad", "data.test", "evaluate", "checkpoint",
    "track",
)  # fmt: skip
"""Keys that may differ when a run is resumed: they don't change what is trained."""


@dataclass(frozen=True)
class Output:
    """Where a run writes, and the checkpoint that it goes on from (None: from the start).

    Args:
        folder: of the run.
        checkpoint: in it.
        sitting: names this start of the run; what a killed one has left says nothing about it.
    """

    folder: Path
    checkpoint: Path | None = None
    sitting: str = ""

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
    folder = Path(recipe.output).expanduser().absolute()
    number = 2
    while recipe.train.fresh and folder.exists() and any(folder.iterdir()):
        folder = Path(f"{Path(recipe.output).expanduser().absolute()}-{number}")
        number += 1
    return folder


@contextmanager
def opened(recipe: Recipe) -> Iterator[Output]:
    """The run's folder, locked against a second run. The first rank looks and decides; the others learn it.

    Raises:
        RecipeError: the folder holds something else, or a run of another recipe.
        CheckpointError: it holds checkpoints and none is whole.
        LuthierError: another run is writing there.
        SystemExit: on the other ranks, where the first refuses.
    """
    told = os.environ.pop(CHOSEN, None)
    if told is not None and os.environ.get("LOCAL_RANK", "0") != "0":  # Lightning has started this process in `fit`
        yield _read(told)
        return
    with ExitStack() as held:
        output = agree(lambda: _decide(recipe, held))
        os.environ[CHOSEN] = _written(output)
        try:
            yield output
        finally:
            os.environ.pop(CHOSEN, None)
            if told is not None:  # a run within a run
                os.environ[CHOSEN] = told


def _decide(recipe: Recipe, held: ExitStack) -> Output:
    folder = choose(recipe)
    _claim(recipe, folder)
    held.enter_context(_locked(folder))
    directory.clear_partial(folder / CHECKPOINTS)
    checkpoint = directory.newest_valid(folder / CHECKPOINTS)
    shutil.rmtree(folder / RANKS, ignore_errors=True)
    return Output(folder, checkpoint, f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}")


def _written(output: Output) -> str:
    return json.dumps([str(output.folder), output.checkpoint and str(output.checkpoint), output.sitting])


def _read(text: str) -> Output:
    folder, checkpoint, sitting = json.loads(text)
    return Output(Path(folder), checkpoint and Path(checkpoint), sitting)


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
    """A lock that goes when this process ends, however it ends."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RecipeError(f"the folder can't be used: {error.strerror}", where="output", given=folder) from error
    _held.add(descriptor)
    try:
        _lock(descriptor, folder)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise LuthierError(
            "another run is writing to this output",
            where=folder,
            given=os.read(descriptor, 200).decode(errors="replace") or None,
            do="wait for it, or give another output",
        ) from None
    except OSError as error:
        raise LuthierError(
            "the file system can't lock files, so that a second run could not be kept out of this output",
            where=folder,
            given=error.strerror,
            do="set output on another file system, or have this one mounted with locks (NFS: its lock service runs; "
            "Lustre: `-o flock`)",
        ) from error


_held: set[int] = set()


def _forget() -> None:
    """A forked process, such as a data worker, must not keep the lock of a run that was killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def _same_training(recipe: Recipe, folder: Path) -> None:
    """Raise if the folder's run trains something else than this recipe."""
    saved = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    with suppress(ValueError):  # fields that are newer than the run have their defaults
        saved = type(recipe).model_validate(saved).model_dump(mode="json")
    here, there = _leaves(recipe.model_dump(mode="json")), _leaves(saved)
    for leaves in (here, there):  # strategies of one family read each other's checkpoints
        leaves["train.strategy"] = family(leaves.get("train.strategy", "auto"))
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
