"""The speed that an estimate assumed, replaced by that of a run's first steps."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ..console import console, duration, is_first_rank
from ..errors import RecipeError
from ..record import write_json

log = logging.getLogger(__name__)

KEPT = "estimate.json"
"""In the run's folder: the estimate, with the true speed as soon as it is known."""
WARMUP = 3
"""Steps that are not timed: they allocate, compile and fill caches."""
TIMED = 10
"""Steps that are."""
BEYOND = 2.0
"""How many times slower or faster than estimated is worth a warning."""


class Speed:
    """Times the first steps of a run and says once what follows; call it after each optimizer step.

    Args:
        given: what `luthier estimate --json` wrote; None: there is nothing to replace.
        folder: of the run, which keeps a copy.
        steps: optimizer steps of the whole run.
    """

    def __init__(self, given: str | None, folder: Path, steps: int):
        self.file, self.steps = folder / KEPT, steps
        self.told: dict[str, Any] | None = None
        self._number, self._seconds, self._cost = 0, 0.0, 0.0
        if given and is_first_rank():
            told = _told(given, folder)
            write_json(self.file, told)
            if "assumed" not in told["time"]:  # else an earlier sitting has said it
                self.told = told

    def __call__(self, step: int, seconds: float, cost: float) -> None:
        """Count a step.

        Args:
            step: optimizer steps done.
            seconds: that it took, without evaluating and saving.
            cost: of its batches with padding, over all ranks, in the modality's unit.
        """
        if self.told is None:
            return
        self._number += 1
        if self._number > WARMUP:
            self._seconds, self._cost = self._seconds + seconds, self._cost + cost
        if self._number == WARMUP + TIMED or (step == self.steps and self._number > WARMUP):
            told, self.told = self.told, None
            if self._seconds and self._cost:
                self._say(told, step)

    def _say(self, told: dict[str, Any], step: int) -> None:
        time, timed = told["time"], self._number - WARMUP
        a_step = self._seconds / self._cost * time["cost"] / time["steps"]  # of mean cost
        whole, assumed = a_step * self.steps, time["seconds"] / time["steps"] * self.steps
        now = {"seconds": whole, "measured": True, "basis": f"{timed} steps of the run", "assumed": time}
        for name in ("price", "price_with_tries"):
            now[name] = None if time[name] is None else time[name] / time["seconds"] * whole
        write_json(self.file, {**told, "time": {**time, **now}})
        paid = "" if now["price"] is None else f"; {now['price']:,.2f} for all of it"
        console.print(
            f"speed: {a_step:.3g} s a step, so {duration(a_step * (self.steps - step))} left without evaluation{paid}",
            highlight=False,
        )
        ratio = whole / assumed
        if not 1 / BEYOND <= ratio <= BEYOND:
            log.warning(
                "the run is %.1f times %s than estimated: %s in all, without evaluation, not %s (%s)",
                max(ratio, 1 / ratio),
                "slower" if ratio > 1 else "faster",
                duration(whole),
                duration(assumed),
                time["basis"],
            )


def refuse(given: str | None, folder: Path) -> None:
    """Raise if there is no such estimate; asked before a run begins."""
    if given:
        _told(given, folder)


def _told(given: str, folder: Path) -> dict[str, Any]:
    """The estimate, as the run's folder has it if it has it already."""
    kept = folder / KEPT
    file = kept if kept.is_file() else Path(given).expanduser()
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not all(found["time"][name] > 0 for name in ("seconds", "steps", "cost")):
            raise ValueError
        return found
    except OSError as error:
        why = error.strerror or type(error).__name__
    except (ValueError, KeyError, TypeError):
        why = "it holds no estimate"
    raise RecipeError(
        f"the estimate can't be used: {why}", where="track.estimate", given=file,
        do="write one with `luthier estimate RECIPE --json FILE`",
    )  # fmt: skip
