"""Saving a run: everything a checkpoint holds, written by the ranks together and committed by the first."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import yaml
from lightning.pytorch import Trainer

from ..data import workers
from ..errors import CheckpointError, LuthierError
from ..recipe import CheckpointSection
from ..record import write_json
from ..task import Task
from . import directory, state
from .position import Position

log = logging.getLogger(__name__)


FULL = (
    "free some space, or set another output, and run the same command: it goes on from the last checkpoint, which is "
    "untouched"
)


class Saver:
    """Writes checkpoints of one run.

    Args:
        root: `OUTPUT/checkpoints`.
        recipe: the resolved recipe as plain values.
        record: the run record.
        section: what is kept, and whether a checkpoint is sealed while the training goes on.
    """

    def __init__(self, root: Path, recipe: dict[str, Any], record: dict[str, Any], section: CheckpointSection):
        self.root, self.recipe, self.record, self.section = root, recipe, record, section
        self._sealing: Future[None] | None = None
        self._size = 0  # bytes of the last checkpoint

    def save(self, trainer: Trainer, task: Task, position: Position, metrics: dict[str, Any] | None) -> None:
        """Save a checkpoint of where the run stands; called on all ranks.

        All of it is written before this returns, so that it holds one step and no other; with `asynchronous`, hashing
        it, forcing it to the disk and renaming it into place follow in the background.

        Raises:
            CheckpointError: weights are not finite, or the disk is full; earlier checkpoints are untouched.
        """
        self.finish()
        target = self.root / directory.name(position.step)
        folder = target.with_name(target.name + directory.PARTIAL)
        with _told(target, folder if trainer.is_global_zero else None):
            with task.gathered(to_save=True):
                if trainer.is_global_zero:
                    directory.need(self.root, self._size or estimate(task))
                    directory.partial(target)
                    self._write_model(task, folder)
                    self._write_record(folder, position, metrics)
            trainer.strategy.barrier("before state")
            trainer.save_checkpoint(folder / "state" / state.FILE)
        if trainer.is_global_zero:
            self._size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            self._sealing = in_background(partial(self._seal, folder, target, replace(position)))
        if not self.section.asynchronous:
            self.finish()
            trainer.strategy.barrier("saved")

    def _seal(self, folder: Path, target: Path, position: Position) -> None:
        with _told(target, folder):
            directory.commit(folder, target)
            directory.prune(self.root, self.publish(position), self.section.keep_last)

    def finish(self) -> None:
        """Wait until the last checkpoint is in its place.

        Raises:
            CheckpointError: it could not be sealed.
        """
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            sealing.result()

    def _write_model(self, task: Task, folder: Path) -> None:
        for name, parameter in task.named_parameters():
            if parameter.requires_grad and not parameter.isfinite().all():
                raise CheckpointError("the weights are not finite, so they are not saved", where=name)
        task.save_pretrained(folder / "model")
        (folder / "state").mkdir()

    def _write_record(self, folder: Path, position: Position, metrics: dict[str, Any] | None) -> None:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(self.recipe, sort_keys=False, allow_unicode=True))
        write_json(folder / "run.json", {**self.record, "position": position.as_dict()})
        write_json(folder / "metrics.json", metrics or {})

    def publish(self, position: Position) -> Path:
        """Point `best` and `last` to their checkpoints and put the best one's metrics into the output; gives the best.

        Done after each save, and once more when a run is resumed, as it may have been killed before it came to this.
        """
        last = self.root / directory.name(position.step)
        best = last if position.best_step is None else self.root / directory.name(position.best_step)
        if not best.is_dir():  # it was found broken and set aside
            best = last
        directory.point(self.root / "best", best)
        directory.point(self.root / "last", last)
        metrics = json.loads((best / "metrics.json").read_text(encoding="utf-8"))
        if metrics:
            write_json(self.root.parent / "metrics.json", {**metrics, "checkpoint": str(self.root / "best")})
        return best


@contextmanager
def _told(target: Path, folder: Path | None) -> Iterator[None]:
    """A full disk and the like as an error that says what to do; what was written so far in `folder` is removed.

    Only by the rank that made it: another one that fails would take it from under the hands of the first, which would
    then tell of a missing folder and not of what happened.
    """
    try:
        yield
    except LuthierError:
        raise
    except Exception as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if (reason := _of_the_system(error)) is None:
            raise
        raise CheckpointError(f"the checkpoint could not be written: {reason}", where=target, do=FULL) from error


def _of_the_system(error: BaseException | None) -> str | None:
    """What the system said, if that is behind an error: libraries in Rust and C++ raise errors of their own for it."""
    while error is not None and not workers.lost(error):
        if isinstance(error, OSError):
            return error.strerror or str(error)
        if found := re.search(r"([^:]+) \(os error \d+\)", str(error)):
            return found[1].strip()
        error = error.__cause__ or error.__context__
    return None


def in_background(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a thread that the end of the process waits for; the result raises what it raised."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            work()
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name="sealing a checkpoint").start()
    return result


STATE_COPIES = {"adamw": 3, "adamw_8bit": 2, "paged_adamw_8bit": 2, "sgd": 2, "adafactor": 2}
"""Values in `state/` for each trained parameter: itself and the optimizer's moments (at most, small parameters aside,
which keep whole moments)."""


def estimate(task: Task, model: int | None = None) -> int:
    """Bytes of a checkpoint, before there is one; `model`: bytes of `model/`, if they are known."""
    trained = sum(p.numel() * p.element_size() for p in task.parameters() if p.requires_grad)
    return (model or trained) + trained * STATE_COPIES[task.recipe.optim.name]
