"""What happens after each optimizer step, in one place and one order: log, evaluate, save, stop."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ..checkpoint import directory
from ..checkpoint.position import Position
from ..checkpoint.save import Saver
from ..data.processing import Schedule
from ..data.stream import StreamPlan
from ..errors import CheckpointError, DataError, RecipeError
from ..evaluation import each
from ..evaluation.kept import keep
from ..evaluation.run import Evaluation
from ..recipe import Recipe
from ..record import write_json, write_text
from ..task import StepResult, Task
from ..trackers.base import Tracker, begin, tell
from .signals import StopSignals
from .speed import Speed
from .spikes import WHY, WrongSteps
from .watch import mark

log = logging.getLogger(__name__)


class AfterStep(Callback):
    """Runs the recipe's events at optimizer-step boundaries.

    Args:
        recipe: the resolved recipe.
        plan: the batches of the whole training.
        saver: writes checkpoints.
        evaluation: evaluates the task; None without validation data.
        output: folder of the run.
        wrong: records the steps that go wrong.
        speed: compares the first steps with an estimate.
        report: told of each step and evaluation, for the progress line.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Schedule,
        saver: Saver,
        evaluation: Callable[[Task], Evaluation] | None,
        output: Path,
        wrong: WrongSteps,
        speed: Speed,
        report: Callable[[AfterStep, Task], None],
    ):
        self.recipe, self.plan, self.saver, self.evaluation = recipe, plan, saver, evaluation
        self.output, self.wrong, self.speed, self.report = output, wrong, speed, report
        self.position = Position(per_step=plan.per_step)
        self.signals = StopSignals()
        self.stopped_by = 0
        self.metrics: dict[str, Any] | None = None
        self._epoch_steps = {math.ceil(end / plan.per_step) for end in plan.epoch_ends()}
        self._clock = time.monotonic()

    # ------------------------------------------------------------------ Lightning's hooks

    def state_dict(self) -> dict[str, Any]:
        return self.position.as_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position.restore(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Task)
        self.signals.install()
        if trainer.is_global_zero:
            begin(trainer.loggers, self.saver.record)
        self._clock = time.monotonic()
        if self._evaluation_due():  # before the first step, or left undone by a run that was stopped
            self._evaluate(trainer, pl_module)
            if self.position.step:
                self._save(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Task)
        self.position.batches += self.plan.ranks
        done = self.position.batches >= self.plan.total
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not done:
            return
        self.position.step += 1
        self._count(pl_module.last_step)
        self._log_step(trainer, pl_module)
        signal = self.signals.agreed()
        if (done or not signal) and self._evaluation_due():
            self._evaluate(trainer, pl_module)
        enough = self.recipe.evaluate.patience is not None and self.position.stale >= self.recipe.evaluate.patience
        if signal or done or enough or self._save_due():
            self._save(trainer, pl_module)
        if signal or enough:
            self.stopped_by = signal
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.remove()
        self.saver.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.signals.remove()
        with suppress(CheckpointError):  # the exception is what is told
            self.saver.finish()

    # ------------------------------------------------------------------ events

    def _count(self, result: StepResult) -> None:
        """Bad examples, and steps that were left out; a step in which nothing carries loss is nobody's fault."""
        self.position.bad += result.bad
        if result.reason:
            self.wrong.add(self.position, result)
            log.warning(
                "step %d %s: %s; loss %s over %g, gradient norm %s",
                self.position.step,
                "left out" if result.skipped else "recorded",
                WHY[result.reason],
                result.loss,
                result.count,
                result.norm,
            )
        if not result.skipped:
            self.position.in_a_row = 0
            return
        self.position.skipped += 1
        self.position.in_a_row += bool(result.count)
        if self.position.in_a_row > self.recipe.train.max_skipped:
            raise self.wrong.too_many(self.position.in_a_row, result)

    def _log_step(self, trainer: Trainer, task: Task) -> None:
        now, result = time.monotonic(), task.last_step
        seconds, self._clock = now - self._clock, now
        self.position.seconds += seconds
        rate = result.items / max(seconds, 1e-9)
        if trainer.is_global_zero:
            self.speed(self.position.step, seconds, result.padded)
        if self.position.step % self.recipe.train.log_every == 0 or self.position.batches >= self.plan.total:
            values = {"train/loss": result.loss, "train/gradient_norm": result.norm, "train/items_per_second": rate}
            values |= {f"train/{name}": value for name, value in result.logs.items()}
            values["train/padding"] = 1 - result.real / result.padded if result.padded else 0.0
            values["train/learning_rate"] = result.learning_rate
            values["train/epoch"] = self.plan.fraction(self.position.batches)
            self._log(trainer, values)
        self.report(self, task)

    def _log(self, trainer: Trainer, values: dict[str, float]) -> None:
        tell(trainer.loggers, lambda logger: logger.log_metrics(values, self.position.step))

    def _evaluation_due(self) -> bool:
        step, section = self.position.step, self.recipe.evaluate
        if self.evaluation is None or self.position.evaluated == step or section.every == "never":
            return False
        if step == 0:
            return section.at_start
        if self.position.batches >= self.plan.total:
            return True
        return step in self._epoch_steps if section.every == "epoch" else step % section.every == 0

    def _evaluate(self, trainer: Trainer, task: Task) -> None:
        assert self.evaluation is not None
        found = self.evaluation(task)
        task.train_mode()
        self.position.evaluated = self.position.step
        where = {"step": self.position.step, "epoch": round(self.plan.fraction(self.position.batches), 4)}
        self.metrics = {**found.metrics, **where}
        self._judge(task)
        values = {k: v for k, v in found.metrics.items() if isinstance(v, int | float)}
        self._log(trainer, {k if "/" in k else f"validation/{k}": v for k, v in values.items()})
        if trainer.is_global_zero:
            self._keep(found, where)
            if found.samples:
                tell(trainer.loggers, lambda logger: logger.log_samples(found.samples, where["step"]), Tracker)
        self.report(self, task)
        self._clock = time.monotonic()

    def _judge(self, task: Task) -> None:
        """Whether this evaluation is the best so far."""
        assert self.metrics is not None
        key, mode = deciding_metric(self.recipe, type(task))
        if key not in self.metrics:
            raise DataError("nothing in the validation data gives the metric", where="checkpoint.best", given=key)
        value = float(self.metrics[key])
        sign = 1 if mode == "min" else -1
        if math.isfinite(value) and (self.position.best is None or sign * value < sign * self.position.best):
            if self.position.step:  # there is no checkpoint of step 0
                self.position.best, self.position.best_step, self.position.stale = value, self.position.step, 0
        else:
            self.position.stale += 1

    def _keep(self, found: Evaluation, where: dict[str, Any]) -> None:
        """Append to the history and write the samples; a repeated evaluation replaces its own line."""
        file = self.output / "evaluations.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] < where["step"]]
        kept.append(json.dumps({**where, **found.metrics}, ensure_ascii=False))
        write_text(file, "\n".join(kept) + "\n")
        if found.samples:
            keep(found.samples, self.output / "samples", f"step-{where['step']:08d}")
        if found.each:
            each.write(each.place(self.output, where["step"]), found.each)

    def _save_due(self) -> bool:
        every, step = self.recipe.checkpoint.every, self.position.step
        if self.position.evaluated == step or (every is not None and step % every == 0):
            return True
        return self.evaluation is None and step in self._epoch_steps

    def _save(self, trainer: Trainer, task: Task) -> None:
        metrics = self.metrics if self.position.evaluated == self.position.step else None
        if isinstance(self.plan, StreamPlan):
            self.position.stream = self.plan.place(self.position.batches)
            if trainer.is_global_zero:
                self._report_read(self.plan)
        mark(f"saving step {self.position.step}")
        self.saver.save(trainer, task, self.position, metrics)
        if trainer.is_global_zero:
            path = self.saver.root / directory.name(self.position.step)
            tell(trainer.loggers, lambda logger: logger.log_checkpoint(path, self.position.step), Tracker)
        self._clock = time.monotonic()

    def _report_read(self, plan: StreamPlan) -> None:
        """Bring the data report up to what has been read of the stream."""
        file = self.output / "data.json"
        known = json.loads(file.read_text(encoding="utf-8"))
        write_json(file, {**known, "train": plan.report(self.position.batches).as_dict()})


def deciding_metric(recipe: Recipe, task: type[Task]) -> tuple[str, str]:
    """The metric that decides which checkpoint is best, and whether its minimum or maximum; known before training.

    Raises:
        RecipeError: the task has no such metric, or the recipe does not ask for it.
    """
    known = task.metrics_of(recipe)
    key = recipe.checkpoint.best or next(iter(known))
    if key not in known:
        other = key in task.metrics
        raise RecipeError(
            "the recipe's evaluation does not give this metric" if other else "the task has no such metric",
            where="checkpoint.best",
            given=key,
            expected=f"one of {', '.join(known)}",
            do="ask for it in the section evaluate" if other else None,
        )
    return key, known[key]
