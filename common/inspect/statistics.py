"""`luthier inspect --stats`: how long the examples are, how well they fill batches, and what is in the data twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from ..console import console
from ..data.collect import Collected
from ..data.plan import Plan
from ..data.processing import Processing
from ..training import data
from .batches import Looked
from .near import pairs

BINS = 12
SETS = ("validation", "regression", "test")
NAMED = 3
"""Pairs named for each place in which something is twice."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the examples of one set, in the unit of the modality."""

    name: str
    examples: int
    total: float
    least: float
    median: float
    high: float
    most: float
    histogram: list[tuple[float, float, int]]
    languages: dict[str, int]

    @property
    def tallest(self) -> int:
        return max((count for _, _, count in self.histogram), default=0) or 1


@dataclass(frozen=True)
class Twice:
    """What is in a set, or in two sets, more than once.

    Args:
        where: the set, or both.
        same: examples that hold what an earlier one holds, exactly.
        near: pairs whose words or tokens are nearly the same, without those; None: they are not looked for.
        examples: some of them.
    """

    where: str
    same: int
    near: int | None
    examples: list[str]


@dataclass(frozen=True)
class Statistics:
    """Those of all sets of a recipe."""

    unit: str
    sets: list[Sizes]
    batches: int
    steps: int
    padding: float
    twice: list[Twice]


def statistics(looked: Looked) -> Statistics:
    """Read all sets of a recipe and count."""
    sets = {"train": looked.train}
    for name in SETS:
        found = data.gather(looked.recipe, looked.processing, name)
        if found is not None:
            sets[name] = found
    return Statistics(
        looked.processing.unit,
        [_sizes(name, found, looked.processing) for name, found in sets.items()],
        looked.plan.total,
        looked.plan.steps,
        padding(looked.plan),
        twice(sets, looked.processing),
    )


def padding(plan: Plan) -> float:
    """Share of all batches of a plan that is padding."""
    real = padded = 0.0
    for batch in plan.batches():
        real, padded = real + float(plan.costs[list(batch.indices)].sum()), padded + plan.cost(batch)
    return 1 - real / padded if padded else 0.0


def _sizes(name: str, found: Collected, processing: Processing[Any]) -> Sizes:
    costs = np.array([processing.cost(example) for example in found.examples], dtype=float)
    counts, edges = np.histogram(costs, bins=min(BINS, max(1, len(np.unique(costs)))))
    bars = [(float(low), float(high), int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)]
    least, median, high, most = (float(value) for value in np.quantile(costs, [0, 0.5, 0.95, 1]))
    known = (_language(example) for example in found.examples)
    languages = Counter(language for language in known if language)
    return Sizes(
        name, len(costs), float(costs.sum()), least, median, high, most, bars, dict(languages.most_common())
    )  # fmt: skip


def _language(example: Any) -> str | None:
    """The language of an example, where the data state it."""
    fields = example if isinstance(example, Mapping) else getattr(example, "fields", None) or {}
    given = getattr(example, "language", None) or fields.get("language")
    return None if given is None else str(given)


# ------------------------------------------------------------------------------------------------ twice


def twice(sets: dict[str, Collected], processing: Processing[Any]) -> list[Twice]:
    """What is in each set more than once, and in the training set and another."""
    names, held, units = {}, {}, {}
    for name, found in sets.items():
        names[name] = [processing.name(example) for example in found.examples]
        held[name] = [list(processing.contents(example)) for example in found.examples]
        units[name] = [processing.units(example) for example in found.examples]
    pairs = [_found(name, names[name], held[name], units[name], None) for name in sets]
    for other in list(sets)[1:]:
        both = [("train", at) for at in range(len(names["train"]))] + [(other, at) for at in range(len(names[other]))]
        pairs.append(
            _found(
                f"train and {other}",
                [f"{name} {names[name][at]}" for name, at in both],
                [held[name][at] for name, at in both],
                [units[name][at] for name, at in both],
                len(names["train"]),
            )
        )
    return pairs


def _found(
    where: str,
    names: Sequence[str],
    held: Sequence[list[Hashable]],
    units: Sequence[Sequence[Any]],
    border: int | None,
) -> Twice:
    """Examples that are twice; with a border only those of which one is before it and one is not."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for at, contents in enumerate(held):
        for one in dict.fromkeys(contents):
            places[one].append(at)
    same: dict[int, int] = {}
    for members in places.values():
        first = members[0]
        if border is not None and first >= border:
            continue
        for at in members[1:]:
            if border is None or at >= border:
                same.setdefault(at, first)
    near = None
    if any(len(one) for one in units):
        near = [
            (one, other)
            for one, other in pairs(units)
            if (border is None or one < border <= other) and not set(held[one]) & set(held[other])
        ]
    told = [f"{names[first]} = {names[at]}" for at, first in list(same.items())[:NAMED]]
    told += [f"{names[one]} ~ {names[other]}" for one, other in (near or [])[:NAMED]]
    return Twice(where, len(same), None if near is None else len(near), told)


# ------------------------------------------------------------------------------------------------ shown


def show(found: Statistics) -> None:
    """Print statistics."""
    table = Table("set", "examples", found.unit, "least", "median", "95 %", "most", title_justify="left")
    for one in found.sets:
        values = (one.total, one.least, one.median, one.high, one.most)
        table.add_row(one.name, f"{one.examples:,}", *(f"{value:,.6g}" for value in values))
    console.print(table)
    for one in found.sets:
        console.print(f"{one.name}: {found.unit} of an example", highlight=False)
        for low, high, count in one.histogram:
            bar = "█" * round(40 * count / one.tallest)
            console.print(f"  {low:>10,.4g} to {high:>10,.4g}  {count:>8,}  {bar}", highlight=False)
        if one.languages:
            mix = ", ".join(f"{name} {count}" for name, count in one.languages.items())
            console.print(f"  languages: {mix}", highlight=False, markup=False)
    console.print(f"plan: {found.batches} batches in {found.steps} steps, {found.padding:.1%} padding", highlight=False)
    for twice in found.twice:
        near = "" if twice.near is None else f", {twice.near} pairs nearly the same"
        console.print(f"twice in {twice.where}: {twice.same} the same{near}", highlight=False)
        for line in twice.examples:
            console.print(f"  {line}", highlight=False, markup=False)
