"""A stream gives the same batches from wherever it begins, each row in its turn, and few of them are in memory."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from luthier.common import reading
from luthier.common.data import sources
from luthier.common.data import stream as streams
from luthier.common.data.plan import Bounds, Plan
from luthier.common.data.processing import Carried, PlannedData, PlanSampler, Processing, loader
from luthier.common.data.rows import Cursor, Row
from luthier.common.data.sources import rows
from luthier.common.data.stream import Place, Stream, Streamed, StreamPlan
from luthier.common.errors import BadExample, DataError, RecipeError
from luthier.common.recipe import DataSection, Source


class Example:
    """A text that can be counted while it is alive."""

    alive: ClassVar[weakref.WeakSet[Example]] = weakref.WeakSet()

    def __init__(self, text: str, where: str):
        self.text, self.where = text, where
        Example.alive.add(self)


class Words(Processing[Any]):
    """An example is a text, its cost the number of its words. A row `a|b` gives two items, `!` is bad, and a text with
    `~` can't be encoded."""

    unit = "words"
    read_rows: int = 0

    def read(self, source: Source) -> Iterator[Any]:
        return self._items(source, None)

    def stream(self, source: Source, cursor: Cursor) -> Iterator[Any]:
        return self._items(source, cursor)

    def _items(self, source: Source, cursor: Cursor | None) -> Iterator[Any]:
        for row in rows(source.path, split=source.split, source=source.label, cursor=cursor):
            self.read_rows += 1
            if isinstance(row, Row):
                for part in str(row.fields["text"]).split("|"):
                    yield Example(part, row.where)
            else:
                yield row

    def examine(self, example: Example, training: bool) -> list[Example]:
        if example.text.startswith("!"):
            raise BadExample("marked", "is marked as bad", where=example.where)
        return [example]

    def cost(self, example: Example) -> float:
        return len(example.text.split())

    def encode(self, example: Example, generator: Any) -> str:
        if example.text.startswith("~"):
            raise BadExample("unreadable", "can't be read", where=example.where)
        return f"{example.text} {generator.integers(10**9)}"

    def collate(self, encoded: Any, generator: Any) -> list[str]:
        return [*encoded, str(generator.integers(10**9))]

    def show(self, data: Any, row: int) -> Any:
        raise NotImplementedError


class Counted(Words):
    """Without a way to begin in the middle of a source."""

    def stream(self, source: Source, cursor: Cursor) -> Iterator[Any]:
        return self.read(source)


def text(number: int) -> str:
    return " ".join([f"t{number}", *["word"] * (number * 5 % 7)])


TEXTS = [text(number) for number in range(37)]


def write(path: Path, texts: list[str]) -> Path:
    """The texts as a file of the kind that its name says, or as a folder."""
    records = [{"text": one} for one in texts]
    table = pa.table({"text": texts})
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n\n" for one in records), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(f"{one}\n" for one in texts), encoding="utf-8")
    elif path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=5)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=5)
    elif path.name == "saved":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(path))
    else:
        path.mkdir()
        for shard in range(2):
            half = len(texts) // 2
            part = texts[shard * half :] if shard else texts[:half]
            parquet.write_table(pa.table({"text": part}), path / f"train-{shard}.parquet", row_group_size=5)
    return path


FORMATS = ("d.jsonl", "d.json", "d.csv", "d.parquet", "d.arrow", "saved", "folder")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read in several batches, and the state of what `datasets` streams is taken several times."""
    monkeypatch.setattr(sources, "_BATCH", 7)


def stream_of(*sources: Source, processing: Words | None = None, **section: Any) -> Stream:
    data = DataSection(train=("unused",), streaming=True, **{"buffer": 10, "max_bad": 1.0, **section})
    return Stream(sources, processing or Words(), data, "data.train")


def plan_of(
    stream: Stream,
    place: Any = None,
    *,
    bounds: Bounds | None = None,
    ranks: int = 1,
    per_step: int = 2,
    steps: int = 30,
    seed: int = 3,
) -> StreamPlan:
    bounds = bounds or Bounds(3, 12, bucket_batches=2)
    first = stream.read(stream.begin)
    costs = [stream.processing.cost(example) for example in first.examples]
    like = Plan(costs, bounds, seed=seed, ranks=ranks, per_step=per_step, steps=steps)
    return StreamPlan(stream, like, place)


def plain(batches: Iterator[Carried]) -> list[tuple[int, int, tuple[int, ...], list[str]]]:
    return [(one.number, one.epoch, one.indices, [each.text for each in one.examples]) for one in batches]


def said(place: dict[str, Any]) -> dict[str, Any]:
    """A place as it comes back from a checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(place))
    return found


def row_of(place: dict[str, Any]) -> dict[str, Any]:
    """A place without the state of `datasets`, which has several for the same row."""
    found = said(place)
    for source in found["sources"]:
        if isinstance(source["start"], list) and isinstance(source["start"][0], str):
            del source["start"][0]
    return found


# ------------------------------------------------------------------------------------------------ which rows


def test_every_row_in_its_turn_and_over_again(tmp_path: Path) -> None:
    """Windows of 10 hold the rows in order; 5 of them end at row 50 = 37 + 13."""
    source = Source(path=str(write(tmp_path / "d.jsonl", TEXTS)))
    stream = stream_of(source)
    place, seen = stream.begin, []
    for number in range(5):
        read = stream.read(place)
        seen += [example.text for example in read.examples]
        assert len(read.examples) == read.report.rows == read.report.kept_rows == 10
        place = Place(number + 1, 0, read.sources, place.report.followed_by(read.report))
    assert seen == (TEXTS * 2)[:50]
    assert place.report.rows == place.report.examples == 50
    assert place.report.cost == sum(len(one.split()) for one in seen)


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    """3 rows of one for each of the other, whatever their sizes: the one furthest behind its share comes next."""
    first = Source(path=str(write(tmp_path / "a.jsonl", [f"a{at}" for at in range(5)])), weight=3)
    second = Source(path=str(write(tmp_path / "b.jsonl", [f"b{at}" for at in range(100)])))
    read = (stream := stream_of(first, second, buffer=16)).read(stream.begin)
    order = [example.text for example in read.examples]
    assert order == ["a0", "a1", "a2", "b0", "a3", "a4", "a0", "b1", "a1", "a2", "a3", "b2", "a4", "a0", "a1", "b3"]


def test_a_window_is_planned_like_a_data_set(tmp_path: Path) -> None:
    source = Source(path=str(write(tmp_path / "d.jsonl", TEXTS)))
    bounds = Bounds(3, 12, bucket_batches=2)
    found = plain(plan_of(stream_of(source), bounds=bounds).batches())
    costs = [len(one.split()) for one in TEXTS[:10]]
    first = [one.indices for one in Plan(costs, bounds, seed=3, epochs=1).batches()]
    assert [indices for _, window, indices, _ in found if window == 0] == first
    for window in range(3):
        texts = [each for _, number, _, batch in found if number == window for each in batch]
        assert sorted(texts) == sorted(TEXTS[10 * window : 10 * window + 10])
    orders = [[indices for _, number, indices, _ in found if number == window] for window in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert [number for number, *_ in found] == list(range(60))


# ------------------------------------------------------------------------------------------------ going on


@pytest.mark.parametrize("processing", [Words, Counted])
@pytest.mark.parametrize("name", FORMATS)
def test_from_every_place_the_rest_is_the_same(name: str, processing: type[Words], tmp_path: Path) -> None:
    """Of two sources, one with several examples in a row and bad rows; over more than one pass of each."""
    texts = [f"{one}|x{at} and|y{at}" if at % 3 == 0 else one for at, one in enumerate(TEXTS)]
    texts[4] = texts[20] = "!bad"
    sources = (
        Source(path=str(write(tmp_path / name, texts)), weight=2),
        Source(path=str(write(tmp_path / "other.jsonl", [f"o{at}" for at in range(11)]))),
    )
    whole = plan_of(stream_of(*sources, processing=processing()), steps=40)
    found, places, counts = [], [], []
    for batch in whole.batches():
        found.append(batch)
        places.append(said(whole.place(batch.number + 1)))
        counts.append(whole.report(batch.number + 1).as_dict())
    expected = plain(iter(found))
    assert places[-1]["sources"][0]["taken"] > sum(len(one.split("|")) for one in texts)
    for number in range(0, 80, 9 if name.startswith("d.") else 27):
        again = plan_of(stream_of(*sources, processing=processing()), places[number - 1] if number else None, steps=40)
        rest = []
        for batch in again.batches(number):
            rest.append(batch)
            assert row_of(again.place(batch.number + 1)) == row_of(places[batch.number])
            assert again.report(batch.number + 1).as_dict() == counts[batch.number]
            assert again.fraction(batch.number + 1) == pytest.approx(whole_fraction(expected, batch.number))
        assert plain(iter(rest)) == expected[number:]


def whole_fraction(batches: list[Any], number: int) -> float:
    """Windows done after batch `number`, counted from the batches; exact but in the last window, which is cut."""
    window = batches[number][1]
    mine = [one[0] for one in batches if one[1] == window]
    if window == batches[-1][1]:
        return pytest.approx(window + 0.5, abs=0.5)  # type: ignore[return-value]
    return float(window + (number - mine[0] + 1) / len(mine))


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "d.arrow", "saved", "folder"])
def test_a_reader_that_can_begins_where_the_window_does(name: str, tmp_path: Path) -> None:
    """One row is read anew, that of the place."""
    source = Source(path=str(write(tmp_path / name, TEXTS)))
    read = (stream := stream_of(source, buffer=20)).read(stream.begin)
    place = Place(1, 0, tuple(said({"at": read.sources})["at"]), read.report)
    again = stream_of(source, processing=(processing := Words()), buffer=5)
    where = [example.where for example in again.read(place).examples]
    assert [one.rpartition("#")[2] for one in where] == (
        ["20", "21", "22", "23", "24"] if name != "d.jsonl" else [f"d.jsonl:{2 * row + 1}" for row in range(20, 25)]
    )
    assert processing.read_rows == 1 + 512  # those of the chunk that is examined together


def test_on_other_ranks_the_same_global_batches(tmp_path: Path) -> None:
    """Also in windows so small that a rank has no batch in some."""
    source = Source(path=str(write(tmp_path / "d.jsonl", TEXTS)))
    for buffer in (1, 2, 10):
        alone = plan_of(stream_of(source, buffer=buffer), per_step=4)
        expected = plain(alone.batches())
        for start in (0, 52):
            both: list[Any] = []
            places = []
            for rank in range(2):
                place = None
                if start:
                    earlier = plan_of(stream_of(source, buffer=buffer), per_step=4)
                    list(islice(earlier.batches(), start))
                    place = said(earlier.place(start))
                mine = plan_of(stream_of(source, buffer=buffer), place, ranks=2, per_step=4)
                both += plain(mine.batches(start, rank))
                places.append(mine.place(mine.total))
            assert sorted(both) == expected[start:]
            assert places[0] == places[1] == alone.place(alone.total)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_carry_their_examples_to_data_workers(workers: int, tmp_path: Path) -> None:
    """The one that can't be encoded is left out and told; random numbers are those of (seed, window, index)."""
    texts = [("~" if at == 12 else "") + one for at, one in enumerate(TEXTS)]
    source = Source(path=str(write(tmp_path / "d.jsonl", texts)))
    plan = plan_of(stream_of(source), steps=12)
    data = PlannedData(plan.stream.processing, [], 7)
    batches = list(loader(data, PlanSampler(plan), workers))
    expected = [PlannedData(Words(), [], 7)[one] for one in plan_of(stream_of(source), steps=12).batches()]
    assert [(one.number, one.indices, one.data) for one in batches] == [
        (one.number, one.indices, one.data) for one in expected
    ]
    assert [error.reason for one in batches for error in one.bad] == ["unreadable"]
    first = next(plan.batches())
    assert data.names(first) == [one.where for one in first.examples]


def test_a_source_that_has_become_shorter_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", TEXTS)
    plan = plan_of(stream_of(Source(path=str(path)), buffer=30))
    begun = next(batch.number for batch in plan.batches() if batch.epoch == 1)
    place = said(plan.place(begun))
    assert place["window"] == 1
    write(path, TEXTS[:8])
    again = StreamPlan(stream_of(Source(path=str(path)), buffer=30), Plan([1.0], Bounds(3), seed=3, steps=30), place)
    with pytest.raises(DataError, match="has become shorter"):
        next(again.batches(begun))


def test_a_cursor_stands_after_the_row_given(tmp_path: Path) -> None:
    """For each format: `rows` from the cursor's place after `n` rows gives the rows from `n` on, at the end none."""
    for name in FORMATS:
        path = str(write(tmp_path / f"{name}" if name[0] != "d" else tmp_path / f"at-{name}", TEXTS))
        cursor = Cursor()
        places = [None, *(json.loads(json.dumps(cursor.place)) for _ in rows(path, cursor=cursor))]
        if name in ("d.json", "d.csv"):
            assert set(places) == {None}
            continue
        for number in (1, 4, 5, 20, 36, 37):
            rest = [row for row in rows(path, cursor=Cursor(places[number])) if isinstance(row, Row)]
            assert [row.fields["text"] for row in rest] == TEXTS[number:]
            whole = [row for row in rows(path, cursor=Cursor()) if isinstance(row, Row)]
            assert [row.where for row in rest] == [row.where for row in whole[number:]]


def test_a_data_set_of_the_hub_is_read_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy in the cache: `datasets` is asked to stream it."""
    asked = []

    def load_dataset(name: str, **options: Any) -> Any:
        asked.append((name, options))
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    source = Source(path="owner/name", split="train")
    whole = plan_of(stream_of(source))
    expected = plain(whole.batches())
    assert {str(one) for one in asked} == {str(("owner/name", {"split": "train", "streaming": True}))}
    assert expected[0][3][0] in TEXTS
    begun = plan_of(stream_of(source))
    list(islice(begun.batches(), 15))
    place = said(begun.place(15))
    assert place["sources"][0]["start"][0]
    assert plain(plan_of(stream_of(source), place).batches(15)) == expected[15:]


# ------------------------------------------------------------------------------------------------ counts and bad rows


def test_rows_are_counted_as_they_are_read(tmp_path: Path) -> None:
    texts = [f"!{one}" if at % 5 == 4 else one for at, one in enumerate(TEXTS)]
    plan = plan_of(stream_of(Source(path=str(write(tmp_path / "d.jsonl", texts))), buffer=8))
    batches = list(plan.batches())
    assert plan.report(0).rows == 0
    windows = Counter(batch.epoch for batch in batches)
    report = plan.report(windows[0])
    assert report.rows == 9  # 0 to 8 without 4
    assert report.dropped == {"marked": 1}
    assert plan.report(windows[0] + 1).rows == 9 + 10  # 9 to 18 without 9 and 14
    assert report.named["marked"] == ["d.jsonl:9: is marked as bad"]  # the 5th row, with blank lines between


def test_bad_rows_are_bounded_in_each_window(tmp_path: Path) -> None:
    """The first window has none; in the second a quarter is bad."""
    texts = [f"!{one}" if at in (11, 13, 15, 17) else one for at, one in enumerate(TEXTS)]
    source = Source(path=str(write(tmp_path / "d.jsonl", texts)))
    stream = stream_of(source, max_bad=0.2)
    plan = plan_of(stream)
    with pytest.raises(DataError, match="too many rows can't be used") as caught:
        list(plan.batches())
    for part in ("data.train", "d.jsonl:23", "4 marked"):
        assert part in str(caught.value)
    stream = stream_of(source, on_bad="raise")
    with pytest.raises(BadExample, match=r"d\.jsonl:23"):
        list(plan_of(stream).batches())


def test_a_source_without_any_good_row_ends(tmp_path: Path) -> None:
    stream = stream_of(Source(path=str(write(tmp_path / "d.jsonl", ["!bad"] * 3))))
    with pytest.raises(DataError, match="no usable example"):
        stream.read(stream.begin)


# ------------------------------------------------------------------------------------------------ memory, threads


def test_no_more_than_two_windows_are_in_memory(tmp_path: Path) -> None:
    """Two of 1000 examples, and the 512 of the chunk that is examined."""
    source = Source(path=str(write(tmp_path / "d.jsonl", [text(number) for number in range(1500)])))
    gc.collect()
    Example.alive.clear()
    train = Streamed.of(stream_of(source, buffer=1000))
    assert (train.part, len(train.examples)) == ("first window, ", 1000)
    plan = plan_of(train.stream, steps=1500)
    train.forget()
    assert len(train.examples) == streams.SPARE
    most = 0
    for batch in plan.batches():
        if batch.number % 40 == 0:
            plan.place(batch.number)
            most = max(most, len(Example.alive))
    assert batch.epoch >= 3
    assert 1000 < most <= 2 * 1000 + 512 + streams.SPARE


def test_the_next_window_is_read_meanwhile(tmp_path: Path) -> None:
    source = Source(path=str(write(tmp_path / "d.jsonl", TEXTS)))
    plan = plan_of(stream_of(source))
    batches = plan.batches()
    next(batches)
    assert plan._ahead is None  # a glance at the first batch reads nothing else
    next(batches)
    assert plan._ahead is not None
    window = plan._ahead[1].result(10)
    assert [example.text for example in window.examples] == TEXTS[10:20]


def test_what_goes_wrong_meanwhile_is_raised_when_the_window_is_due(tmp_path: Path) -> None:
    texts = [f"!{one}" if at == 13 else one for at, one in enumerate(TEXTS)]
    plan = plan_of(stream_of(Source(path=str(write(tmp_path / "d.jsonl", texts))), on_bad="raise"))
    seen = []
    with pytest.raises(BadExample, match=r"d\.jsonl:27"):
        seen.extend(plan.batches())
    assert {batch.epoch for batch in seen} == {0}
    assert sorted(each.text for batch in seen for each in batch.examples) == sorted(TEXTS[:10])


def test_no_process_is_forked_while_a_window_is_read() -> None:
    """A child would inherit the lock of a thread that it doesn't have, and wait for it forever."""
    holds, leave, order = threading.Event(), threading.Event(), []

    def read() -> None:
        with streams._reading:
            holds.set()
            leave.wait(10)
            order.append("read")

    thread = threading.Thread(target=read)
    thread.start()
    assert holds.wait(10)
    threading.Timer(0.2, leave.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if streams._reading.acquire(timeout=5) else 1)
    order.append("forked")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
    assert order == ["read", "forked"]


# ------------------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs=2", "data.streaming has no epochs; give train.steps"),
        ("data.validation=v.jsonl", "give evaluate.every as a number of steps, or never"),
    ],
)
def test_a_stream_has_no_epochs(override: str, message: str) -> None:
    tree = {
        "task": {"kind": "llm.sft"},
        "model": {"path": "model"},
        "data": {"train": "a.jsonl", "streaming": True},
        "train": {} if "epochs" in override else {"steps": 5},
        "output": "out",
    }
    with pytest.raises(RecipeError, match=message):
        reading.build(reading.override(tree, [override]), "recipe.yaml")
    tree["train"] = {"steps": 5}
    tree["evaluate"] = {"every": 2}
    tree["data"]["validation"] = "v.jsonl"
    assert reading.build(tree, "recipe.yaml").data.buffer == 10_000
