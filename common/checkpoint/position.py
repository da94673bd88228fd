"""Where a run stands: all that is saved besides weights, optimizer and schedule."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import CheckpointError


@dataclass
class Position:
    """Counters of a run.

    Args:
        step: optimizer steps done.
        batches: batches of the plan done, over all ranks; the plan goes on from there.
        per_step: batches in an optimizer step, over all ranks.
        evaluated: step of the last evaluation, -1 before the first.
        best: value of the deciding metric at the best checkpoint so far.
        best_step: its step.
        stale: evaluations since then.
        skipped: optimizer steps left out so far.
        in_a_row: of these, the last ones without a good step between them.
        bad: examples that could not be encoded so far.
        seconds: time spent training, over all sittings.
        stream: where the window of the next batch begins (see `stream.StreamPlan.place`); None without a stream.
    """

    step: int = 0
    batches: int = 0
    per_step: int = 1
    evaluated: int = -1
    best: float | None = None
    best_step: int | None = None
    stale: int = 0
    skipped: int = 0
    in_a_row: int = 0
    bad: int = 0
    seconds: float = 0.0
    stream: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        if state["per_step"] != self.per_step:
            raise CheckpointError(
                "the optimizer step of the checkpoint is made of another number of batches",
                given=f"devices x accumulate = {self.per_step}",
                expected=str(state["per_step"]),
                do=f"set train.accumulate so that devices x accumulate is {state['per_step']}",
            )
        for name, value in state.items():
            setattr(self, name, value)
