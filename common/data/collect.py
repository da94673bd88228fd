"""Reading and checking a whole data set, with every row accounted for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..errors import BadExample, DataError
from ..recipe import DataSection, Source
from .processing import Processing

SHOWN = 5
"""Bad examples named in full for each reason."""


@dataclass
class Report:
    """What became of the rows: `rows == kept_rows + dropped`, always.

    Args:
        rows: rows read.
        kept_rows: rows that gave at least one example.
        examples: examples made of them (more than rows where rows were cut into pieces).
        dropped: number of rows left out, by reason.
        noted: what was changed in examples that were kept, by name (see `Processing.notes`).
        named: the first few of them for each reason, with file and row.
        cost: summed cost of the examples, in `unit`.
    """

    unit: str = "examples"
    rows: int = 0
    kept_rows: int = 0
    examples: int = 0
    cost: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, error: BadExample) -> None:
        self.dropped[error.reason] += 1
        named = self.named.setdefault(error.reason, [])
        if len(named) < SHOWN:
            named.append(str(error))

    def followed_by(self, other: Report) -> Report:
        """The report of both together."""
        both = Report(self.unit)
        for name in ("rows", "kept_rows", "examples", "cost"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        both.dropped, both.noted = self.dropped + other.dropped, self.noted + other.noted
        for reason in {**self.named, **other.named}:
            both.named[reason] = [*self.named.get(reason, []), *other.named.get(reason, [])][:SHOWN]
        return both

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "kept_rows": self.kept_rows,
            "examples": self.examples,
            self.unit: round(self.cost, 3),
            "dropped": dict(self.dropped),
            "noted": dict(self.noted),
            "named": self.named,
        }

    def summary(self) -> str:
        """One line: rows, examples, cost, what was dropped by reason, and what was changed."""
        line = f"{self.rows} rows, {self.examples} examples, {self.cost:,.0f} {self.unit}"
        if self.dropped:
            line += "; dropped " + ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        if self.noted:
            line += "; " + ", ".join(f"{count:,} {name}" for name, count in self.noted.items())
        return line


@dataclass
class Collected:
    """Examples of one or more sources, ready to be planned; `part` says which, if they are not all."""

    examples: list[Any]
    weights: list[float]
    report: Report
    part: str = ""


def collect(
    sources: Sequence[Source],
    processing: Processing[Any],
    data: DataSection,
    where: str = "data",
    training: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Collected:
    """Read and check every row of the sources.

    Args:
        sources: the data sets, as in the recipe.
        processing: what the modality does with its data.
        data: the policy for bad examples.
        where: place in the recipe, for messages.
        training: whether the set is trained on.
        progress: called with the number of rows done.

    Raises:
        BadExample: with `on_bad: raise`, the first bad example.
        DataError: too many bad examples, or no good one.
    """
    found = Collected([], [], Report(processing.unit))
    report = found.report
    for source in sources:
        usable: list[Any] = []
        for outcome in examined(processing, processing.read(source), training):
            usable += counted(outcome, report, processing, data)
            if progress:
                progress(report.rows)
        arranged = processing.arrange(usable, training)
        found.examples += arranged
        found.weights += [source.weight] * len(arranged)
        report.cost += sum(processing.cost(example) for example in arranged)
    report.examples = len(found.examples)
    bounded(report, data.max_bad, where)
    return found


def counted(
    outcome: list[Any] | BadExample, report: Report, processing: Processing[Any], data: DataSection
) -> list[Any]:
    """The examples of a row, which is now in the report. Raises the BadExample itself with `on_bad: raise`."""
    report.rows += 1
    if isinstance(outcome, BadExample):
        if data.on_bad == "raise":
            raise outcome
        report.drop(outcome)
        return []
    report.kept_rows += 1
    for example in outcome:
        report.noted.update(processing.notes(example))
    return outcome


def bounded(report: Report, max_bad: float, where: str) -> None:
    """Raise DataError if too many rows were dropped, or none gave an example."""
    dropped = sum(report.dropped.values())
    lines = [f"    {line}" for reason in report.named for line in report.named[reason][:2]]
    if dropped and dropped > max_bad * report.rows:
        raise DataError(
            "too many rows can't be used",
            where=where,
            given=f"{report.summary()}\n" + "\n".join(lines),
            expected=f"at most {max_bad:.0%} of the rows (data.max_bad)",
            do="mend the rows, or raise data.max_bad",
        )
    if not report.examples:
        raise DataError("no usable example", where=where, given=report.summary())


def examined(
    processing: Processing[Any], items: Iterable[Any | BadExample], training: bool
) -> Iterator[list[Any] | BadExample]:
    """Checks in threads (reading files waits on the disk and decoding leaves Python), in the order of the rows."""

    def one(item: Any | BadExample) -> list[Any] | BadExample:
        if isinstance(item, BadExample):
            return item
        try:
            return processing.examine(item, training) or BadExample(
                "empty", "the row gives no example", where=getattr(item, "where", None)
            )
        except BadExample as error:
            return error

    iterator = iter(items)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        while chunk := list(islice(iterator, 512)):
            yield from pool.map(one, chunk)
