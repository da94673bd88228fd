"""The page of batches, and the statistics of sets, of a small processing whose numbers can be counted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from luthier.common import console
from luthier.common.data.collect import Collected, collect
from luthier.common.data.plan import Bounds, Plan
from luthier.common.data.processing import Processing, Shown
from luthier.common.data.sources import rows
from luthier.common.errors import BadExample
from luthier.common.inspect import page, statistics, terminal
from luthier.common.inspect.batches import Looked
from luthier.common.pages.media import grey
from luthier.common.recipe import DataSection, Source
from luthier.common.training import data

HOSTILE = "<script>alert(1)</script>"


class WordProcessing(Processing[dict[str, Any]]):
    """Examples are texts; every second word carries loss."""

    unit = "words"

    def read(self, source: Source) -> Any:
        for row in rows(source.path, source=source.label):
            yield row if isinstance(row, BadExample) else {**row.fields, "where": row.where}

    def examine(self, example: dict[str, Any], training: bool) -> list[dict[str, Any]]:
        if not example["text"]:
            raise BadExample("empty_text", f"no text {HOSTILE}", where=example["where"])
        return [example]

    def cost(self, example: dict[str, Any]) -> float:
        return len(example["text"].split())

    def contents(self, example: dict[str, Any]) -> list[Hashable]:
        return [example["text"]]

    def units(self, example: dict[str, Any]) -> Sequence[Hashable]:
        return example["text"].split()

    def encode(self, example: dict[str, Any], generator: Any) -> dict[str, Any]:
        return example

    def collate(self, encoded: Sequence[Any], generator: Any) -> list[dict[str, Any]]:
        return list(encoded)

    def show(self, data: Any, row: int) -> Shown:
        words = data[row]["text"].split()
        tokens = [(f"{word} ", at % 2 == 1) for at, word in enumerate(words)]
        return Shown(data[row]["where"], {"words": str(len(words))}, tokens, "drawing", ((0, "query"), (2, "answer 1")))

    def beside(self, data: Any, row: int) -> Mapping[str, bytes | str]:
        if "broken" in data[row]["text"]:
            raise BadExample("gone", "the picture is gone", where=data[row]["where"])
        return {"note": HOSTILE, "picture.png": grey([[0.0, 1.0]])}


@pytest.fixture
def looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Looked]:
    """The data of some sets of texts."""

    def make(**sets: list[str]) -> Looked:
        files = {name: tmp_path / f"{name}.jsonl" for name in sets}
        for name, texts in sets.items():
            lines = [json.dumps({"text": text, "language": "it" if at % 2 else "en"}) for at, text in enumerate(texts)]
            files[name].write_text("\n".join(lines))
        section = DataSection(**{name: str(file) for name, file in files.items()}, max_bad=1.0)
        processing = WordProcessing()
        found: dict[str, Collected] = {
            name: collect(getattr(section, name), processing, section, training=name == "train") for name in sets
        }
        monkeypatch.setattr(data, "gather", lambda recipe, processing, name: found.get(name))
        costs = [processing.cost(example) for example in found["train"].examples]
        plan = Plan(costs, Bounds(2, bucket_batches=0), seed=0, epochs=1)
        recipe: Any = SimpleNamespace(task=SimpleNamespace(kind="test.words"), train=SimpleNamespace(seed=0))
        return Looked(recipe, processing, found["train"], plan)

    return make


def test_the_page_shows_tokens_parts_pictures_and_no_markup(looked_at, tmp_path: Path) -> None:
    looked = looked_at(train=[f"a {HOSTILE} c d", "[UNK] broken", ""])
    page.write(looked, 1, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert '<span class="quiet">a </span><span class="loss">&lt;script&gt;' in text
    assert '<span class="border">query</span>' in text
    assert '<span class="border">answer 1</span><span class="quiet">c </span><span class="loss">d </span>' in text
    assert '<span class="unknown">[UNK] </span>' in text
    assert 'src="data:image/png;base64,' in text
    assert "the picture is gone" in text
    assert "empty_text" in text
    assert text.count("drawing") == 1, "only where there is no picture"
    assert "2 examples" in text
    assert "http:" not in text
    assert "https:" not in text


def test_parts_hold_every_token_once() -> None:
    tokens = [("a", False), ("b", True), ("c", True)]
    assert page.parts(Shown("", {}, tokens)) == [("", [("a", "quiet"), ("b", "loss"), ("c", "loss")])]
    shown = Shown("", {}, tokens, parts=((1, "later"),))
    assert page.parts(shown) == [("", [("a", "quiet")]), ("later", [("b", "loss"), ("c", "loss")])]


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"


def test_statistics_are_those_counted_by_hand(looked_at) -> None:
    looked = looked_at(
        train=["a b c d", "a b", LONG, f"{LONG} more", "a b"],
        validation=["a b", "x y z", f"{LONG} other"],
    )
    found = statistics.statistics(looked)
    train, validation = found.sets
    assert (train.examples, train.total, train.least, train.median, train.most) == (5, 43.0, 2.0, 4.0, 18.0)
    assert sum(count for _, _, count in train.histogram) == 5
    assert train.languages == {"en": 3, "it": 2}
    assert validation.examples == 3
    within, own, between = found.twice
    assert (within.where, within.same, within.near) == ("train", 1, 1), "`a b` twice; the long text with one word more"
    assert (own.where, own.same, own.near) == ("validation", 0, 0)
    assert (between.where, between.same, between.near) == ("train and validation", 1, 2)
    assert between.examples[0] == "train train.jsonl:2 = validation validation.jsonl:1"


def test_padding_is_that_of_the_plan(looked_at) -> None:
    """Two batches of two in whatever order: costs 4, 2, 4, 2 padded to the longest of each."""
    looked = looked_at(train=["a b c d", "e f", "g h i j", "k l"])
    batches = [[looked.plan.costs[at] for at in batch.indices] for batch in looked.plan.batches()]
    padded = sum(max(costs) * len(costs) for costs in batches)
    assert statistics.padding(looked.plan) == pytest.approx(1 - 12 / padded)


def test_all_is_printed(looked_at, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looked = looked_at(train=["a b c d", "a b"], validation=["a b"])
    told = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    for module in (statistics, terminal):
        monkeypatch.setattr(module, "console", told)
    assert console.console is not told
    statistics.show(statistics.statistics(looked))
    terminal.inspect(looked)
    text = told.export_text()
    assert "twice in train and validation: 1 the same, 0 pairs nearly the same" in text
    assert "languages: en 1, it 1" in text
    assert "answer 1: c |d |" in text
    page.write(looked, 1, tmp_path / "page.html", statistics.statistics(looked))
    assert "train and validation" in (tmp_path / "page.html").read_text(encoding="utf-8")
