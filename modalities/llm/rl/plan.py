"""The batches of a training whose data are made by rollouts.

A rollout gives the completions of all batches of some optimizer steps, over all ranks, which are then trained on in
some passes. The batches of the prompts are planned as ever (`Plan`); of rollout r, with S batches and I passes, the
training's batches [r S I, (r + 1) S I) are I times the plan's batches [r S, (r + 1) S). The first that a rank sees of
them brings the others with it (`Planned.ahead`), as all of them are completed then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ....common.data.plan import Plan, Planned


class RolloutPlan:
    """The batches of a training.

    Args:
        plan: batches of prompts, in whole rollouts unless there is one pass.
        size: batches of a rollout S, over all ranks; a multiple of those of an optimizer step.
        passes: how often a rollout is trained on, I.
        steps: optimizer steps after which the training ends; default: all.
    """

    def __init__(self, plan: Plan, size: int, passes: int, steps: int | None = None):
        self.plan, self.size, self.passes = plan, size, passes
        self.ranks, self.per_step = plan.ranks, plan.per_step
        whole = plan.total * passes
        self.total = whole if steps is None else min(whole, steps * plan.per_step)

    @property
    def steps(self) -> int:
        return math.ceil(self.total / self.per_step)

    def epoch_ends(self) -> list[int]:
        """Batches done when the last rollout with prompts of an epoch has been trained on."""
        if self.passes == 1:
            return self.plan.epoch_ends()
        ends = [math.ceil(end / self.size) * self.size * self.passes for end in self.plan.epoch_ends()]
        return [min(end, self.total) for end in ends]

    def fraction(self, number: int) -> float:
        rollout, inside = divmod(number, self.size * self.passes)
        return self.plan.fraction(rollout * self.size + inside // self.passes)

    def batches(self, start: int = 0, rank: int = 0) -> Iterator[Planned]:
        """The batches of one rank, from batch number `start` (a multiple of the number of ranks) to the end."""
        for number in range(start + rank, self.total, self.ranks):
            first, passed, place = place_of(number, self.size, self.passes)
            planned = self._planned(number)
            if passed == 0 and place == rank:
                end = min(first + self.size, self.total)
                later = range(number + self.ranks, end, self.ranks)
                planned = replace(planned, ahead=tuple(self._planned(one) for one in later))
            yield planned

    def _planned(self, number: int) -> Planned:
        first, _, place = place_of(number, self.size, self.passes)
        found = next(self.plan.batches(first // self.passes + place))
        return replace(found, number=number)


def place_of(number: int, size: int, passes: int) -> tuple[int, int, int]:
    """(number of the first batch of its rollout, pass, place in the pass) of a batch of the training."""
    span = size * passes
    inside = number % span
    return number - inside, inside // size, inside % size
