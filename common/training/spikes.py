"""Steps that go wrong: loss spikes are found, and every step that was left out or spiked is recorded with its examples.

What happens to such a step is decided in `Task.configure_gradient_clipping`, from numbers that are summed over all
ranks, so that all ranks decide alike.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..checkpoint.position import Position
from ..console import is_first_rank
from ..data.plan import Planned
from ..data.processing import Schedule
from ..errors import LuthierError
from ..record import write_text

if TYPE_CHECKING:
    from ..task import StepResult

FILE = "skipped.jsonl"
WINDOW, FIRST = 50, 20
"""Losses that a step's loss is compared with, and how many there have to be before any is called a spike."""

WHY = {
    "non_finite": "loss or gradient is not finite",
    "spike": "the loss is a spike",
    "nothing": "nothing in it carries loss",
}
"""What the reasons of a `StepResult` mean."""


class Spikes:
    """Finds steps whose loss is far above what it was lately.

    The median isn't moved by the spikes themselves. It is compared as a ratio, so that nothing is a spike while the
    median is not positive.

    Args:
        factor: a loss above this many times the median of the last 50 is a spike; None: nothing is.
        skip: whether spikes are left out of the training; they are left out of the window then too.
    """

    def __init__(self, factor: float | None, skip: bool):
        self.factor, self.skip = factor, skip
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def seen(self, loss: float) -> bool:
        """Whether this step's mean loss (finite) is a spike; takes it into the window."""
        if self.factor is None:
            return False
        usual = median(self._losses) if len(self._losses) >= FIRST else 0.0
        spike = usual > 0 and loss > self.factor * usual
        if not (spike and self.skip):
            self._losses.append(loss)
        return spike

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=WINDOW)


class WrongSteps:
    """`OUTPUT/skipped.jsonl`: one line for each step that was left out or spiked, with the examples in it.

    Args:
        folder: of the run.
        plan: the batches of the whole training.
        names: where the examples of a batch come from, `file:row`.
        start: optimizer steps done when the run begins; lines of later steps, left by a run that was killed after its
            last checkpoint, are removed.
    """

    def __init__(self, folder: Path, plan: Schedule, names: Callable[[Planned], Sequence[str]], start: int):
        self.file, self.plan, self.names = folder / FILE, plan, names
        if is_first_rank() and self.file.exists():
            kept = [line for line in read(self.file) if line["step"] <= start]
            write_text(self.file, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in kept))

    def add(self, position: Position, result: StepResult) -> None:
        """Record the step that has just been done; written on the first rank, which knows all ranks' batches."""
        if not is_first_rank():
            return
        batches = self._batches((position.step - 1) * position.per_step, position.batches)
        line = {
            "step": position.step,
            "reason": result.reason,
            "left_out": result.skipped,
            "loss": _number(result.loss),
            "gradient_norm": _number(result.norm),
            "batches": [batch.number for batch in batches],
            "examples": [name for batch in batches for name in self.names(batch)],
        }
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _batches(self, start: int, end: int) -> Sequence[Planned]:
        """The batches `start` to `end` of all ranks, in order."""
        ranks = self.plan.ranks
        each = [islice(self.plan.batches(start, rank), (end - start) // ranks) for rank in range(ranks)]
        return sorted(chain(*each), key=lambda batch: batch.number)

    def too_many(self, in_a_row: int, result: StepResult) -> LuthierError:
        """The error for a run that left out too many steps one after the other, of which `result` is the last."""
        found = f"loss {result.loss}, gradient norm {result.norm}"
        if result.reason == "spike":
            return LuthierError(
                f"{in_a_row} optimizer steps in a row were left out, the last for a loss spike",
                where="train.max_skipped",
                given=found,
                do=f"look at the examples that {self.file} names; if the loss has come to another level for good, use "
                "train.on_spike=record or a higher train.spike_factor; the last checkpoint is good",
            )
        return LuthierError(
            f"{in_a_row} optimizer steps in a row had no finite loss and gradient",
            where="train.max_skipped",
            given=found,
            do=f"look at the examples that {self.file} names, or lower optim.learning_rate; the last checkpoint is "
            "good",
        )


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a record; a last line that a killed run left half is dropped."""
    lines = []
    for text in file.read_text(encoding="utf-8").split("\n"):
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _number(value: float) -> float | str:
    """JSON has no nan and inf: they are written as text."""
    return value if math.isfinite(value) else str(value)
