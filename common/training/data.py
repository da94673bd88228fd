"""The data of a run: every set of the recipe read, checked and reported."""

from __future__ import annotations

import os
from typing import Any

from ..console import progress
from ..data.collect import Collected, collect
from ..data.plan import Bounds, Plan
from ..data.processing import Processing
from ..data.sources import fingerprint
from ..recipe import Recipe, Sources


def gather(recipe: Recipe, processing: Processing[Any], name: str) -> Collected | None:
    """The examples of `data.<name>`, or None if the recipe gives no such set."""
    sources: Sources = getattr(recipe.data, name)
    if not sources:
        return None
    with progress(f"checking data.{name}", "rows") as show:
        return collect(sources, processing, recipe.data, f"data.{name}", name == "train", lambda rows: show(rows, None))


def described(recipe: Recipe, sets: dict[str, Collected | None]) -> dict[str, Any]:
    """Report and SHA-256 of each data set, for the run record."""
    found = {}
    for name, collected in sets.items():
        if collected is not None:
            sources = {source.path: fingerprint(source.path) for source in getattr(recipe.data, name)}
            found[name] = {**collected.report.as_dict(), "sha256": sources}
    return found


def workers(recipe: Recipe) -> int:
    """Data processes for each device."""
    if recipe.data.workers is not None:
        return recipe.data.workers
    cores = os.cpu_count() or 1
    return 0 if cores <= 2 else min(8, cores // 2)


def plan(recipe: Recipe, train: Collected, processing: Processing[Any], ranks: int, per_step: int) -> Plan:
    """The batches of the whole training."""
    batch = recipe.data.batch
    epochs = recipe.train.epochs if recipe.train.epochs or recipe.train.steps else 3.0
    return Plan(
        [processing.cost(example) for example in train.examples],
        Bounds(batch.examples, batch.budget(), batch.bucket_batches, processing.joined, batch.packed),
        seed=recipe.train.seed,
        ranks=ranks,
        per_step=per_step,
        epochs=epochs,
        steps=recipe.train.steps,
        weights=train.weights,
    )
