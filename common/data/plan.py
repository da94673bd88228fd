"""Batches are planned, not drawn.

A `Plan` is the whole training as one sequence of numbered batches, over all epochs. Batch `n` is a pure function of
(costs, seed, n), so where a run stands is one number, resuming costs nothing, and every rank knows every batch.

Ranks take turns: of W ranks, rank r runs the batches r, r + W, r + 2W, ... An optimizer step is made of the next
`per_step` = W x accumulate batches, so another number of ranks with the same `per_step` sees the same global batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import DataError, RecipeError
from .packing import pack

JITTER = 0.05
"""Relative noise on the sort key, so that batches of similar lengths differ from epoch to epoch."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch to be made.

    Args:
        number: position in the whole training.
        epoch: pass over the data that it belongs to.
        indices: examples in it.
        ahead: later batches that are made together with it, as the task needs to know them already.
    """

    number: int
    epoch: int
    indices: tuple[int, ...]
    ahead: tuple[Planned, ...] = ()


@dataclass(frozen=True)
class Bounds:
    """What one batch may hold.

    Args:
        examples: most examples.
        budget: most cost: the longest times their number, as they are padded, or their sum if they are `joined`.
        bucket_batches: examples are sorted by cost within this many batches.
        joined: examples stand one after the other, so that there is no padding and nothing to sort for.
        packed: fill each batch with the examples that fit best, up to the budget, whatever their number.
    """

    examples: int
    budget: float | None = None
    bucket_batches: int = 100
    joined: bool = False
    packed: bool = False

    def cost(self, longest: float, total: float, number: int) -> float:
        """What a batch costs, padding included; of its longest example, the sum of all, and their number."""
        return total if self.joined else longest * number

    def fits(self, longest: float, total: float, number: int) -> bool:
        cost = self.cost(longest, total, number)
        return number <= self.examples and (self.budget is None or cost <= self.budget)


def cut(order: Sequence[int] | np.ndarray, costs: np.ndarray, bounds: Bounds) -> list[tuple[int, ...]]:
    """Cut an order of examples into consecutive batches within the bounds; every example is in exactly one."""
    if bounds.packed and bounds.budget is not None:
        chosen = np.asarray(order, dtype=np.int64)
        return [tuple(chosen[list(row)].tolist()) for row in pack(costs[chosen], int(bounds.budget))]
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    longest = total = 0.0
    for index in order:
        cost = float(costs[index])
        if batch and not bounds.fits(max(longest, cost), total + cost, len(batch) + 1):
            batches.append(tuple(batch))
            batch, longest, total = [], 0.0, 0.0
        batch.append(int(index))
        longest, total = max(longest, cost), total + cost
    if batch:
        batches.append(tuple(batch))
    return batches


class Plan:
    """All batches of a training.

    Args:
        costs: [N] cost of each example, in the modality's unit (seconds, tokens, pixels).
        bounds: what one batch may hold.
        seed: order of examples and batches.
        ranks: number of processes W.
        per_step: batches in one optimizer step, over all ranks; a multiple of `ranks`.
        epochs: passes over the data, or None if `steps` is given.
        steps: optimizer steps.
        weights: [N] share of each example in an epoch (1 = once); default: all 1.
        groups: [N] numbers; examples of different groups never share a batch. Default: one group.

    Raises:
        DataError: no examples; one example alone exceeds the budget.
    """

    def __init__(
        self,
        costs: Sequence[float],
        bounds: Bounds,
        *,
        seed: int,
        ranks: int = 1,
        per_step: int = 1,
        epochs: float | None = None,
        steps: int | None = None,
        weights: Sequence[float] | None = None,
        groups: Sequence[int] | None = None,
    ):
        self.costs = np.asarray(costs, dtype=np.float64)
        self.weights = np.ones(len(self.costs)) if weights is None else np.asarray(weights, dtype=np.float64)
        self.groups = np.zeros(len(self.costs), dtype=int) if groups is None else np.asarray(groups)
        self.bounds, self.seed, self.ranks, self.per_step = bounds, seed, ranks, per_step
        if len(self.costs) == 0:
            raise DataError("no examples to plan")
        if bounds.budget is not None and self.costs.max() > bounds.budget:
            raise DataError(
                "the longest example alone exceeds the batch budget",
                where="data.batch",
                given=f"{self.costs.max():g}",
                expected=f"at most {bounds.budget:g}",
                do="raise the budget",
            )
        if per_step % ranks:
            raise RecipeError(
                "the batches of an optimizer step can't be shared equally",
                where="train.devices",
                given=f"{ranks} processes for {per_step} batches a step",
                expected="a divisor of the batches",
            )
        self._starts = [0]  # number of the first batch of each epoch; one longer than the epochs planned so far
        self._real = self._length(epochs, steps)
        if self._real == 0:
            raise DataError("no example has its turn in this training", do="raise train.epochs, or the sources' weight")
        self.total = math.ceil(self._real / ranks) * ranks

    @property
    def steps(self) -> int:
        """Optimizer steps in the whole training; the last may hold fewer batches."""
        return math.ceil(self.total / self.per_step)

    def _length(self, epochs: float | None, steps: int | None) -> int:
        """Batches before the last step is shared out equally."""
        if steps is not None:
            return steps * self.per_step
        whole, part = divmod(epochs or 1.0, 1.0)
        while len(self._starts) <= whole:
            self._grow()
        return self._starts[int(whole)] + (math.ceil(part * len(self._epoch(int(whole)))) if part else 0)

    def _grow(self) -> None:
        self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))

    def epoch_of(self, number: int) -> int:
        """The epoch that batch `number` belongs to."""
        while self._starts[-1] <= number:
            self._grow()
        return int(np.searchsorted(self._starts, number, side="right")) - 1

    def epoch_ends(self) -> list[int]:
        """Numbers of batches done when each whole epoch within this training ends."""
        self.epoch_of(self._real - 1)
        ends = [start for start in self._starts[1:] if start <= self._real]
        return [self.total if end == self._real else end for end in ends]

    def fraction(self, number: int) -> float:
        """Epochs done after `number` batches."""
        if number == 0:
            return 0.0
        number = min(number, self._real)
        epoch = self.epoch_of(number - 1)
        return epoch + (number - self._starts[epoch]) / (self._starts[epoch + 1] - self._starts[epoch])

    def batches(self, start: int = 0, rank: int = 0) -> Iterator[Planned]:
        """The batches of one rank, from batch number `start` (a multiple of the number of ranks) to the end."""
        last_window = (self.total - 1) // self.per_step * self.per_step
        for number in range(start + rank, self.total, self.ranks):
            if number < last_window:
                yield Planned(number, *self._at(number))
            else:
                yield self._tail(last_window)[number - last_window]

    def cost(self, planned: Planned) -> float:
        """Cost of a batch, padding included."""
        costs = self.costs[list(planned.indices)]
        return self.bounds.cost(float(costs.max(initial=0.0)), float(costs.sum()), len(costs))

    def _at(self, number: int) -> tuple[int, tuple[int, ...]]:
        epoch = self.epoch_of(number)
        return epoch, self._epoch(epoch)[number - self._starts[epoch]]

    def _tail(self, first: int) -> list[Planned]:
        """The batches of the last optimizer step: the largest are split until each rank has equally many.

        Only the batches of this step change, so the steps before it are the same for any number of ranks, and no
        example is dropped or seen twice to fill up.
        """
        batches = [self._at(number) for number in range(first, self._real)]
        while len(batches) < self.total - first:
            at = max(range(len(batches)), key=lambda i: len(batches[i][1]))
            epoch, indices = batches[at]
            half = len(indices) // 2  # with fewer examples than ranks some batches are empty
            batches[at : at + 1] = [(epoch, indices[:half]), (epoch, indices[half:])]
        return [Planned(first + i, epoch, indices) for i, (epoch, indices) in enumerate(batches)]

    @lru_cache(maxsize=2)  # noqa: B019 - a plan lives as long as its run
    def _epoch(self, epoch: int) -> list[tuple[int, ...]]:
        """The batches of one epoch, in order."""
        generator = np.random.default_rng([self.seed, epoch])
        order = self._chosen(epoch, generator)
        parts = [order[self.groups[order] == group] for group in np.unique(self.groups[order])]
        batches = [batch for part in parts for batch in self._cut(part, generator)]
        if len(parts) == 1 and not self._is_sorted:
            return batches  # in the order that was drawn already
        return [batches[i] for i in generator.permutation(len(batches))]

    @property
    def _is_sorted(self) -> bool:
        """Whether batches come in an order of their costs, that has to be shuffled again."""
        return self.bounds.packed or not (self.bounds.bucket_batches == 0 or self.bounds.joined)

    def _cut(self, order: np.ndarray, generator: np.random.Generator) -> list[tuple[int, ...]]:
        """The batches of one group."""
        if self.bounds.packed or not self._is_sorted:
            return cut(order, self.costs, self.bounds)
        noisy = self.costs * (1 + JITTER * generator.uniform(-1, 1, len(self.costs)))
        chunk = self.bounds.bucket_batches * self.bounds.examples
        batches: list[tuple[int, ...]] = []
        for at in range(0, len(order), chunk):
            part = order[at : at + chunk]
            batches += cut(part[np.argsort(noisy[part], kind="stable")], self.costs, self.bounds)
        return batches

    def _chosen(self, epoch: int, generator: np.random.Generator) -> np.ndarray:
        """The examples of an epoch, shuffled: whole copies by weight, and a rotating share for its fraction."""
        indices = np.arange(len(self.costs))
        # A fixed place in [0, 1) for each example. After e epochs it has been taken floor(e x weight + place) times, so
        # that every example has its turn, and none twice for a rounding.
        place = np.random.default_rng([self.seed, 2**31]).permutation(len(indices)) / len(indices)
        taken = [np.floor(done * self.weights + place).astype(int) for done in (epoch, epoch + 1)]
        chosen = np.repeat(indices, taken[1] - taken[0])
        return generator.permutation(chosen)
