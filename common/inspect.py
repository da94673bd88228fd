"""`luthier inspect`: batches as the model sees them."""

from __future__ import annotations

from itertools import islice

from rich.text import Text

from . import kinds
from .console import console
from .data.processing import Batch, PlannedData, Shown
from .recipe import Recipe
from .training import data


def inspect(recipe: Recipe, batches: int = 1) -> None:
    """Print the first training batches: each example's facts, input and tokens, those that carry loss in green."""
    processing = kinds.task(recipe.task.kind).make_processing(recipe)
    train = data.gather(recipe, processing, "train")
    assert train is not None
    console.print(f"train: {train.report.summary()}", highlight=False)
    for lines in train.report.named.values():
        console.print("\n".join(lines), highlight=False, markup=False)
    plan = data.plan(recipe, train, processing, 1, recipe.train.accumulate)
    made = PlannedData(processing, train.examples, recipe.train.seed)
    for planned in islice(plan.batches(), batches):
        batch: Batch = made[planned]
        share = 1 - batch.real / batch.padded if batch.padded else 0.0
        console.rule(f"batch {batch.number}: {len(batch.indices)} examples, {share:.0%} padding")
        for error in batch.bad:
            console.print(str(error), highlight=False, markup=False)
        for row in range(len(batch.indices)):
            _print(processing.show(batch.data, row))


def _print(shown: Shown) -> None:
    console.print(Text(shown.title, style="bold"))
    for name, value in shown.facts.items():
        console.print(f"  {name:>10}  {value}", highlight=False, markup=False)
    line = Text("      tokens  ")
    for text, carries_loss in shown.tokens:
        line.append(text, style="green" if carries_loss else "dim")
        line.append("|", style="dim")
    console.print(line)
    if shown.picture:
        console.print(shown.picture, highlight=False, markup=False)
