"""The first batches of a training, whatever shows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .. import kinds
from ..data.collect import Collected
from ..data.plan import Plan
from ..data.processing import Batch, PlannedData, Processing
from ..recipe import Recipe
from ..training import data


@dataclass(frozen=True)
class Looked:
    """The training data of a recipe, read and planned.

    Args:
        recipe: whose they are.
        processing: makes batches of them.
        train: the examples.
        plan: their batches.
    """

    recipe: Recipe
    processing: Processing[Any]
    train: Collected
    plan: Plan

    @classmethod
    def at(cls, recipe: Recipe) -> Looked:
        """Read and plan the data of a recipe."""
        processing = kinds.task(recipe.task.kind).make_processing(recipe)
        train = data.gather(recipe, processing, "train")
        assert train is not None  # the recipe requires it
        return cls(recipe, processing, train, data.plan(recipe, train, processing, 1, recipe.train.accumulate))

    def batches(self, number: int) -> Iterator[Batch]:
        """The first ones."""
        made = PlannedData(self.processing, self.train.examples, self.recipe.train.seed)
        for planned in islice(self.plan.batches(), number):
            yield made[planned]


def padding(batch: Batch) -> float:
    """Share of a batch that is padding."""
    return 1 - batch.real / batch.padded if batch.padded else 0.0
