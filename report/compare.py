"""`luthier compare`: whether two runs differ by more than noise, and in what they were made differently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from ..common.console import console
from . import tables
from .intervals import DRAWS, SHARE, Difference, paired
from .runs import Curve, Run, plain

BLOCKS = 20
"""Stretches of a curve whose mean differences are compared with each other."""
FINE = 100
"""Draws for each metric at least: of fewer than 40 no p is below 5 % shared out among the metrics."""
CURVES = ("train/loss", "validation/loss")


@dataclass(frozen=True)
class Apart:
    """Two curves at the steps that both have.

    Args:
        points: how many.
        largest: largest absolute difference, at `step`.
        mean: mean difference, the second less the first.
        error: standard error of the mean, from stretches of the curve; 0 for fewer than two points.
        level: mean absolute value of the first.
        differ: whether the mean is beyond both its error and the tolerance.
    """

    points: int
    largest: float
    step: int
    mean: float
    error: float
    level: float
    differ: bool


@dataclass(frozen=True)
class Verdict:
    """A metric of both runs.

    Args:
        one, other: the values.
        found: the paired difference; None: nothing is known of single examples.
        differ: whether the difference is significant and beyond the tolerance; where nothing is known of single
            examples, whether it is beyond the tolerance.
    """

    one: float
    other: float
    found: Difference | None
    differ: bool


@dataclass
class Comparison:
    """What two runs have the same and what not."""

    runs: tuple[Run, Run]
    curves: dict[str, Apart]
    metrics: dict[str, Verdict]
    recipe: dict[str, list[Any]]
    versions: dict[str, list[Any]]
    hashes: dict[str, list[Any]] = field(default_factory=dict)
    why_unpaired: str | None = None

    @property
    def differ(self) -> bool:
        """Whether a curve or a metric differs beyond noise."""
        return any(one.differ for one in self.curves.values()) or any(one.differ for one in self.metrics.values())


def compare(one: Run, other: Run, tolerance: float = 0.01) -> Comparison:
    """Compare two runs.

    Args:
        one, other: the runs.
        tolerance: relative difference that never counts.
    """
    names = [name for name in one.curves if name in other.curves and name in CURVES]
    known = [tables.hashes(run) for run in (one, other)]
    why, found = _paired(one, other)
    return Comparison(
        (one, other),
        {name: apart for name in names if (apart := _apart(one.curves[name], other.curves[name], tolerance))},
        _verdicts(one, other, found, tolerance),
        tables.recipe_diff([one, other]),
        {name: values for name, values, differ in tables.versions([one, other]) if differ},
        {
            name: [own.get(name) for own in known]
            for name in dict.fromkeys(name for own in known for name in own)
            if known[0].get(name) != known[1].get(name)
        },
        why,
    )


def _apart(one: Curve, other: Curve, tolerance: float) -> Apart | None:
    """Compare at common steps; None if there are none."""
    there = dict(other)
    pairs = [(step, value, there[step]) for step, value in one if step in there]
    if not pairs:
        return None
    steps, first, second = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    gaps = second - first
    at = int(np.abs(gaps).argmax())
    means = [part.mean() for part in np.array_split(gaps, min(BLOCKS, len(gaps)))]
    error = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0
    mean, level = float(gaps.mean()), float(np.abs(first).mean())
    # Two standard errors are about 95 %; of one point there is nothing but the tolerance.
    differ = abs(mean) > 2 * error and abs(mean) > tolerance * level
    return Apart(len(pairs), float(abs(gaps[at])), int(steps[at]), mean, error, level, differ)


def _paired(one: Run, other: Run) -> tuple[str | None, dict[str, Difference]]:
    """(why single examples can't be compared, differences of the metrics when they can)."""
    first, second = one.examples, other.examples
    if first is None or second is None:
        without = [run.name for run in (one, other) if run.examples is None]
        return f"{' and '.join(without)} kept no results of single examples", {}
    if first.where != second.where:
        return "the runs were evaluated on different examples", {}
    names = first.parts.keys() & second.parts.keys()
    return None, paired(first.parts, second.parts, max(DRAWS, FINE * len(names)))


def _verdicts(one: Run, other: Run, found: dict[str, Difference], tolerance: float) -> dict[str, Verdict]:
    """Significant at 5 % over all metrics together (Bonferroni)."""
    first, second = plain(one.metrics), plain(other.metrics)
    verdicts = {}
    for name in [name for name in first if name in second and name not in tables.COUNTS]:
        values = first[name], second[name]
        difference = found.get(name)
        if any(map(math.isnan, values)):  # one that is no number beside one that is differs for certain
            verdicts[name] = Verdict(*values, difference, not all(map(math.isnan, values)))
            continue
        beyond = abs(values[1] - values[0]) > tolerance * max(abs(values[0]), abs(values[1]))
        # Beside metrics that can be judged, those that can't are only told.
        significant = not found if difference is None else difference.p < (1 - SHARE) / len(found)
        verdicts[name] = Verdict(*values, difference, beyond and significant)
    return verdicts


# ------------------------------------------------------------------------------------------------ shown


def show(found: Comparison) -> None:
    """Print a comparison."""
    names = [run.name for run in found.runs]
    _show_made(found, names)
    if found.curves:
        table = Table("curve", "common points", "mean difference", "its error", "largest", "", title_justify="left")
        for name, one in found.curves.items():
            largest = f"{one.largest:.4g} at step {one.step}"
            table.add_row(
                name, str(one.points), f"{one.mean:+.4g}", f"{one.error:.2g}", largest, _word(one.differ, one.mean)
            )
        console.print(table)
    else:
        console.print("no step at which both runs logged a loss")
    table = Table("metric", *names, "difference", "95 %", "p", "", title_justify="left")
    for name, verdict in found.metrics.items():
        table.add_row(name, f"{verdict.one:.4g}", f"{verdict.other:.4g}", *_cells(verdict))
    console.print(table)
    if found.why_unpaired:
        console.print(f"{found.why_unpaired}: metrics were judged by the tolerance alone, and nothing is said of noise")
    console.print("they differ beyond noise" if found.differ else "no difference beyond noise", style="bold")


def _show_made(found: Comparison, names: Sequence[str]) -> None:
    for title, rows in (("setting", found.recipe), ("package", found.versions), ("data, SHA-256", found.hashes)):
        if rows:
            table = Table(title, *names, title_justify="left")
            for name, values in rows.items():
                table.add_row(name, *("-" if value is None else str(value)[:60] for value in values))
            console.print(table)


def _cells(verdict: Verdict) -> list[str]:
    apart = verdict.other - verdict.one
    if verdict.found is None:
        return [f"{apart:+.4g}", "", "", _word(verdict.differ, apart)]
    found = verdict.found
    return [
        f"{found.value:+.4g}",
        f"{found.low:+.4g} to {found.high:+.4g}",
        f"{found.p:.3f}",
        _word(verdict.differ, apart),
    ]


def _word(differ: bool, apart: float) -> str:
    return "differ" if differ else "the same" if apart == 0 else "noise"
