"""The data of a run: every set of the recipe read, checked and reported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..console import progress
from ..data.collect import Collected, collect
from ..data.plan import Bounds, Plan
from ..data.processing import Processing, Schedule
from ..data.sources import fingerprint
from ..data.stream import Stream, Streamed, StreamPlan
from ..recipe import Recipe, Sources


def gather(recipe: Recipe, processing: Processing[Any], name: str) -> Collected | None:
    """The examples of `data.<name>`, or None if the recipe gives no such set; of a stream its first window."""
    sources: Sources = getattr(recipe.data, name)
    if not sources:
        return None
    where, training = f"data.{name}", name == "train"
    with progress(f"checking {where}", "rows") as show:
        if training and recipe.data.streaming:
            stream = Stream(sources, processing, recipe.data, where)
            return Streamed.of(stream, lambda rows: show(rows, None))
        return collect(sources, processing, recipe.data, where, training, lambda rows: show(rows, None))


def described(recipe: Recipe, sets: dict[str, Collected | None]) -> dict[str, Any]:
    """Report and SHA-256 of each data set, for the run record; of what is streamed only the size, as it is not read
    for the sake of its hash."""
    found = {}
    for name, collected in sets.items():
        if collected is None:
            continue
        paths = [source.path for source in getattr(recipe.data, name)]
        if isinstance(collected, Streamed):
            known: dict[str, Any] = {"bytes": {path: _size(path) for path in paths}}
        else:
            known = {"sha256": {path: fingerprint(path) for path in paths}}
        found[name] = {**collected.report.as_dict(), **known}
    return found


def _size(path: str) -> int | None:
    """Bytes of a file or of all files of a folder; None for a name on the hub."""
    place = Path(path)
    if not place.exists():
        return None
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def workers(recipe: Recipe) -> int:
    """Data processes for each device."""
    if recipe.data.workers is not None:
        return recipe.data.workers
    cores = os.cpu_count() or 1
    return 0 if cores <= 2 else min(8, cores // 2)


def plan(recipe: Recipe, train: Collected, processing: Processing[Any], ranks: int, per_step: int) -> Plan:
    """The batches of the whole training; of a stream, as if its first window were all."""
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
        groups=[processing.group(example) for example in train.examples],
    )


def schedule(
    recipe: Recipe,
    train: Collected,
    processing: Processing[Any],
    ranks: int,
    per_step: int,
    place: Mapping[str, Any] | None = None,
) -> Schedule:
    """The batches of a run: all of its epochs, or those of a stream from `place` on, where the run stood."""
    found = plan(recipe, train, processing, ranks, per_step)
    return StreamPlan(train.stream, found, place) if isinstance(train, Streamed) else processing.schedule(found)
