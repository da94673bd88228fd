"""Data too large for memory: read as it goes, in windows, each planned like a data set of its own.

A window is the next `data.buffer` examples of the sources, whose rows are mixed in the proportion of their weights; a
source that ends starts over. Window `w` is planned like a data set with the seed (seed, w), for one epoch. So batch `n`
is a pure function of (data, recipe, n) still, and where a run stands is the `Place` at which its window begins: there
the window is read anew, and the batches that are done are left out. At most two windows are in memory, the one that is
trained on and the one that is read meanwhile. Every rank reads all of the data.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..errors import BadExample, DataError
from ..recipe import DataSection, Source
from .collect import Collected, Report, bounded, counted, examined
from .plan import Plan
from .processing import Carried, Processing
from .rows import Cursor

SPARE = 64
"""Examples of the first window that stay, as stand-ins (see `PlannedData`)."""
STRIDE = 2**32
"""Between the seeds of two windows."""

_reading = threading.RLock()
"""Held while a window is read: a data worker must not be forked meanwhile, as it would inherit locks that are held by
threads that it does not have."""
os.register_at_fork(before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release)


@dataclass(frozen=True)
class Place:
    """Where a window begins.

    Args:
        window: its number.
        batch: number of its first batch.
        sources: where the reader of each source stands (see `Reader.mark`).
        report: of all that lies before.
    """

    window: int
    batch: int
    sources: tuple[Mapping[str, Any], ...]
    report: Report

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        report = {**vars(self.report), "dropped": dict(self.report.dropped), "noted": dict(self.report.noted)}
        return {"window": self.window, "batch": self.batch, "sources": [*self.sources], "report": report}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Place:
        """The place that `as_dict` gave."""
        report = values["report"]
        counts = {name: Counter(report[name]) for name in ("dropped", "noted")}
        return cls(values["window"], values["batch"], tuple(values["sources"]), Report(**{**report, **counts}))


class Reader:
    """The items of one source, over and over, from a mark on."""

    def __init__(self, source: Source, processing: Processing[Any], mark: Mapping[str, Any]):
        self.source, self.processing = source, processing
        self.taken: int = mark["taken"]
        self._open(mark["start"], mark["skip"])

    def _open(self, start: Any, skip: int) -> None:
        self._start, self._skip = start, skip
        self._cursor = Cursor(start)
        self._items = self.processing.stream(self.source, self._cursor)
        if sum(1 for _ in islice(self._items, skip)) < skip:
            raise DataError(
                "the source has become shorter since the run was saved",
                where=self.source.path,
                do="give the run the data that it began with, or start another",
            )

    def mark(self) -> dict[str, Any]:
        """Where it stands: `start`, a place of its cursor; `skip`, items since then; `taken`, items since the begin."""
        return {"start": self._start, "skip": self._skip, "taken": self.taken}

    def next(self) -> Any | BadExample:
        before = self._cursor.place
        item = next(self._items, None)
        if item is None:
            self._open(None, 0)
            before, item = None, next(self._items, None)
        if item is None:
            raise DataError("the source holds no rows", where=self.source.path)
        if self._cursor.place == before:  # one more item of the same row, or of a source without places
            self._skip += 1
        else:
            self._start, self._skip = before, 1
        self.taken += 1
        return item


@dataclass(frozen=True)
class Read:
    """What was read for a window.

    Args:
        examples: of the window.
        report: of its rows.
        sources: where the readers stand after it.
    """

    examples: list[Any]
    report: Report
    sources: tuple[Mapping[str, Any], ...]


class Stream:
    """The examples of sources, from any place on.

    Args:
        sources: the data sets, as in the recipe.
        processing: what the modality does with its data.
        data: size of a window, and the policy for bad examples, which holds for each window.
        where: place in the recipe, for messages.
    """

    def __init__(self, sources: Sequence[Source], processing: Processing[Any], data: DataSection, where: str = "data"):
        self.sources, self.processing, self.data, self.where = sources, processing, data, where
        nothing = {"start": None, "skip": 0, "taken": 0}
        self.begin = Place(0, 0, tuple(nothing for _ in sources), Report(processing.unit))
        self._at: tuple[Mapping[str, Any], ...] | None = None  # where the open readers stand
        self._last: tuple[tuple[Mapping[str, Any], ...], Read] | None = None

    def read(self, place: Place, progress: Callable[[int], None] | None = None) -> Read:
        """The window that begins at a place.

        Args:
            place: of its begin.
            progress: called with the number of rows done.

        Raises:
            BadExample: with `on_bad: raise`, the first bad example.
            DataError: too many bad examples in it, or no good one.
        """
        with _reading:
            if self._last is not None and self._last[0] == place.sources:
                return self._last[1]
            self._last = None  # before the next one is read
            if self._at != place.sources:
                self._open(place)
            found = self._window(progress)
            self._last = place.sources, found
            return found

    def forget(self) -> None:
        """Keep no window in memory."""
        self._last = None

    def _open(self, place: Place) -> None:
        pairs = zip(self.sources, place.sources, strict=True)
        self._readers = [Reader(source, self.processing, mark) for source, mark in pairs]
        self._marks: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._outcomes = examined(self.processing, self._mixed(), True)
        self._at = place.sources

    def _mixed(self) -> Iterator[Any]:
        """Items of all sources: always of the one that is furthest behind its share."""
        weights = [source.weight for source in self.sources]
        while True:
            number = min(range(len(weights)), key=lambda at: (self._readers[at].taken + 1) / weights[at])
            item = self._readers[number].next()
            self._marks.append((number, self._readers[number].mark()))
            yield item

    def _window(self, progress: Callable[[int], None] | None) -> Read:
        assert self._at is not None
        report, marks = Report(self.processing.unit), list(self._at)
        usable: list[Any] = []
        self._at = None  # until it is read without an error
        while len(usable) < self.data.buffer:
            outcome = next(self._outcomes)
            number, marks[number] = self._marks.popleft()
            usable += counted(outcome, report, self.processing, self.data)
            if report.rows >= self.data.buffer > len(usable):
                report.examples = len(usable)
                bounded(report, self.data.max_bad, self.where)
            if progress:
                progress(report.rows)
        examples = self.processing.arrange(usable, True)
        report.examples = len(examples)
        report.cost = sum(self.processing.cost(example) for example in examples)
        bounded(report, self.data.max_bad, self.where)
        self._at = tuple(marks)
        return Read(examples, report, self._at)


@dataclass
class Streamed(Collected):
    """The first window of a stream, and the stream."""

    stream: Stream = field(kw_only=True)

    @classmethod
    def of(cls, stream: Stream, progress: Callable[[int], None] | None = None) -> Streamed:
        """Read the first window."""
        first = stream.read(stream.begin, progress)
        return cls([*first.examples], [1.0] * len(first.examples), first.report, "first window, ", stream=stream)

    def forget(self) -> None:
        """Keep only the stand-ins."""
        del self.examples[SPARE:]


@dataclass(frozen=True)
class Window:
    """A window that is planned.

    Args:
        place: where it begins.
        examples: of it.
        batches: indices of the examples of each batch.
        end: where the next one begins.
    """

    place: Place
    examples: list[Any]
    batches: list[tuple[int, ...]]
    end: Place

    def batch(self, number: int) -> Carried:
        indices = self.batches[number - self.place.batch]
        return Carried(number, self.place.window, indices, examples=tuple(self.examples[index] for index in indices))


class StreamPlan:
    """All batches of a training on a stream, as `Plan` has them for a data set; an epoch is a window.

    Args:
        stream: of the examples.
        like: plan of the first window, made with the recipe's bounds, seed, ranks and steps; the others are made alike.
        place: `place(number)` of the run that goes on; None: from the begin.
    """

    def __init__(self, stream: Stream, like: Plan, place: Mapping[str, Any] | None = None):
        self.stream, self.bounds, self.seed = stream, like.bounds, like.seed
        self.ranks, self.per_step, self.total, self.steps = like.ranks, like.per_step, like.total, like.steps
        self._places = [stream.begin if place is None else Place.of(place)]  # of windows in a row; the last is to come
        self._windows: dict[int, Window] = {}
        self._ahead: tuple[int, Future[Window]] | None = None

    def epoch_ends(self) -> list[int]:
        """A stream has no epochs that could be known ahead."""
        return []

    def batches(self, start: int = 0, rank: int = 0) -> Iterator[Carried]:
        """The batches of one rank, from batch number `start` (a multiple of the number of ranks) to the end. From the
        second one on, the next window is read meanwhile."""
        window: Window | None = None
        for number in range(start + rank, self.total, self.ranks):
            if window is None or number >= window.end.batch:
                self._reach(number + 1)
                window = self._window(self._before(number))
            yield window.batch(number)
            self._read_ahead(window)

    # ------------------------------------------------------------------ where a run stands

    def place(self, number: int) -> dict[str, Any]:
        """Where the window of batch `number`, the next one to be run, begins; as plain values. What is no longer needed
        to look back at the last optimizer step is forgotten."""
        self._reach(number)
        found = self._before(number)
        oldest = self._before(max(number - self.per_step, self._places[0].batch))
        self._places = [place for place in self._places if place.window >= oldest.window]
        return found.as_dict()

    def fraction(self, number: int) -> float:
        """Windows done after `number` batches."""
        self._reach(number)
        place = self._before(number)
        if place.batch == number:
            return float(place.window)
        end = self._places[place.window + 1 - self._places[0].window]
        return place.window + (number - place.batch) / (end.batch - place.batch)

    def report(self, number: int) -> Report:
        """Of all rows in the windows that `number` batches have begun."""
        self._reach(number)
        return next((place for place in self._places if place.batch >= number), self._places[-1]).report

    def _reach(self, number: int) -> None:
        """Read until the window of the batch before `number` is known; other ranks may have run it."""
        while self._places[-1].batch < number:
            self._window(self._places[-1])

    def _before(self, number: int) -> Place:
        """The last known place at or before a batch."""
        return self._places[bisect_right(self._places, number, key=lambda place: place.batch) - 1]

    # ------------------------------------------------------------------ windows

    def _window(self, place: Place) -> Window:
        found = self._windows.get(place.window)
        if found is None:
            ahead = self._ahead[1] if self._ahead and self._ahead[0] == place.window else None
            found = self._planned(place) if ahead is None else ahead.result()
            self._windows[place.window] = found
            while len(self._windows) > 2:
                del self._windows[next(iter(self._windows))]
        if place is self._places[-1]:
            self._places.append(found.end)
        return found

    def _planned(self, place: Place) -> Window:
        read, processing = self.stream.read(place), self.stream.processing
        self.stream.forget()
        plan = Plan(
            [processing.cost(example) for example in read.examples],
            self.bounds,
            seed=self.seed + STRIDE * place.window,
            epochs=1,
            groups=[processing.group(example) for example in read.examples],
        )
        batches = [planned.indices for planned in plan.batches()]
        report = place.report.followed_by(read.report)
        end = Place(place.window + 1, place.batch + len(batches), read.sources, report)
        return Window(place, read.examples, batches, end)

    def _read_ahead(self, window: Window) -> None:
        """Begin to read the window after this one, if it is not begun yet."""
        number = window.end.window
        if window.end.batch >= self.total or number in self._windows or (self._ahead and self._ahead[0] >= number):
            return
        future: Future[Window] = Future()
        self._windows = {window.place.window: window}
        self._ahead = number, future

        def read() -> None:
            try:
                future.set_result(self._planned(window.end))
            except BaseException as error:  # it is raised where the window is asked for
                future.set_exception(error)

        threading.Thread(target=read, name="stream", daemon=True).start()
