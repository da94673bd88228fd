"""Saving a run: everything a checkpoint holds, written by the ranks together and committed by the first."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer

from ..errors import CheckpointError
from ..record import write_json
from ..task import Task
from . import directory, state
from .position import Position

log = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints of one run.

    Args:
        root: `OUTPUT/checkpoints`.
        recipe: the resolved recipe as plain values.
        record: the run record.
        keep_last: newest checkpoints kept besides the best.
    """

    def __init__(self, root: Path, recipe: dict[str, Any], record: dict[str, Any], keep_last: int):
        self.root, self.recipe, self.record, self.keep_last = root, recipe, record, keep_last

    def save(self, trainer: Trainer, task: Task, position: Position, metrics: dict[str, Any] | None) -> Path:
        """Save and commit a checkpoint of where the run stands; called on all ranks.

        Raises:
            CheckpointError: weights are not finite, or the disk is full; earlier checkpoints are untouched.
        """
        target = self.root / directory.name(position.step)
        folder = target.with_name(target.name + directory.PARTIAL)
        try:
            if trainer.is_global_zero:
                directory.partial(target)
                self._write_model(task, folder)
                self._write_record(folder, position, metrics)
            trainer.strategy.barrier("before state")
            trainer.save_checkpoint(folder / "state" / state.FILE)
            if trainer.is_global_zero:
                directory.commit(folder, target)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint could not be written: {error.strerror or error}",
                where=target,
                do="free some space, or set another output, and run the same command: it goes on from the last "
                "checkpoint, which is untouched",
            ) from error
        if trainer.is_global_zero:
            best = self.publish(position)
            directory.prune(self.root, best, self.keep_last)
        trainer.strategy.barrier("saved")
        return target

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
