"""The live line of a training: loss, speed, padding, time left."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from ..console import EVERY, console, duration, is_first_rank

if TYPE_CHECKING:
    from ..task import Task
    from .after_step import AfterStep


class ProgressLine:
    """Shows where a run stands; call it after each optimizer step and each evaluation. Use as a context manager."""

    def __init__(self, unit: str):
        self.unit = unit
        self._recent: deque[tuple[float, int, float, float, float]] = deque(maxlen=50)
        self._started = self._printed = time.monotonic()
        self._first_step: int | None = None
        self._live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> ProgressLine:
        if self._live and is_first_rank():
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, run: AfterStep, task: Task) -> None:
        if not is_first_rank():
            return
        if run.metrics and run.metrics.get("step") == run.position.step:
            self._evaluated(run)
            return
        result, now = task.last_step, time.monotonic()
        if self._first_step is None:
            self._first_step, self._started = run.position.step, now
        self._recent.append((now, result.items, result.loss, result.real, result.padded))
        line = self._line(run, now)
        if self._live:
            self._live.update(Text(line))
        elif now - self._printed >= EVERY or run.position.step == run.plan.steps:
            self._printed = now
            console.print(line, highlight=False)

    def _line(self, run: AfterStep, now: float) -> str:
        step, steps = run.position.step, run.plan.steps
        seconds = max(now - self._recent[0][0], 1e-9)
        items = sum(row[1] for row in list(self._recent)[1:])
        real, padded = (sum(row[at] for row in self._recent) for at in (3, 4))
        loss = sum(row[2] for row in self._recent) / len(self._recent)
        parts = [f"step {step}/{steps}", f"epoch {run.plan.fraction(run.position.batches):.2f}", f"loss {loss:.4f}"]
        if len(self._recent) > 1:
            parts += [
                f"{items / seconds:.1f} examples/s",
                f"{(sum(r[3] for r in list(self._recent)[1:])) / seconds:.0f} {self.unit}/s",
            ]
        if padded:
            parts.append(f"padding {1 - real / padded:.0%}")
        done = step - (self._first_step or 0)
        if done:
            parts.append(f"ETA {duration((now - self._started) / done * (steps - step))}")
        return "  ".join(parts)

    def _evaluated(self, run: AfterStep) -> None:
        assert run.metrics is not None
        values = [
            f"{name} {value:.4f}" for name, value in run.metrics.items() if isinstance(value, float) and name != "epoch"
        ]
        best = "  (best so far)" if run.position.best_step == run.position.step else ""
        console.print(f"step {run.position.step}  evaluation: {'  '.join(values)}{best}", highlight=False)
