"""Every row of the data is accounted for: kept, or left out under a reason and named."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.common.data.collect import SHOWN, Collected, Report, collect
from luthier.common.data.processing import Processing
from luthier.common.data.rows import Row
from luthier.common.data.sources import rows
from luthier.common.errors import BadExample, DataError
from luthier.common.recipe import DataSection, Source


class Words(Processing[Any]):
    """An example is a text; its cost is the number of its words. `a|b` is cut into two, `!reason` is bad, and `?reason`
    in training only."""

    unit = "words"

    def read(self, source: Source) -> Iterator[Any]:
        yield from rows(source.path, source=source.label)

    def examine(self, example: Row, training: bool) -> list[str]:
        text = example.fields.get("text")
        if text is None:
            raise BadExample("no_text", "has no `text`", where=example.where)
        if text.startswith("slow"):
            time.sleep(0.002)
        if text.startswith("!"):
            raise BadExample(text[1:], "is marked as bad", where=example.where, given=text)
        if text.startswith("?") and training:
            raise BadExample(text[1:], "can't be trained on", where=example.where)
        return [part for part in text.split("|") if part]

    def cost(self, example: str) -> float:
        return len(example.split())

    def encode(self, example: str, generator: Any) -> Any:
        return example

    def collate(self, encoded: Any, generator: Any) -> Any:
        return encoded

    def show(self, data: Any, row: int) -> Any:
        raise NotImplementedError


def source(file: Path, lines: list[Any], **options: Any) -> Source:
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return Source(path=str(file), **options)


def texts(*found: str) -> list[dict[str, str]]:
    return [{"text": text} for text in found]


def collected(sources: list[Source], on_progress: Any = None, training: bool = True, **policy: Any) -> Collected:
    data = DataSection(train=("unused",), **policy)
    return collect(sources, Words(), data, "data.train", training, on_progress)


def balanced(report: Report) -> bool:
    return report.rows == report.kept_rows + sum(report.dropped.values())


# ------------------------------------------------------------------------------------------------ counts


def test_counts_add_up_over_several_sources(tmp_path: Path) -> None:
    first = source(tmp_path / "a.jsonl", [*texts("one two", "!noisy", "three"), "not json\n", {"other": 1}], weight=2)
    second = source(tmp_path / "b.jsonl", texts("four|five six", "!noisy", "!short"))
    found = collected([first, second], max_bad=1)
    report = found.report
    assert found.examples == ["one two", "three", "four", "five six"]
    assert found.weights == [2, 2, 1, 1]
    assert (report.rows, report.kept_rows, report.examples) == (8, 3, 4)
    assert balanced(report)
    assert report.dropped["noisy"] == 2
    assert report.dropped["short"] == report.dropped["no_text"] == 1
    assert sum(report.dropped.values()) == 5  # and the line that is no JSON, under the reader's own name for it
    assert report.cost == 2 + 1 + 1 + 2


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(kinds=st.lists(st.sampled_from(["good one", "a|b|c", "!x", "!y", "slow row"]), min_size=1, max_size=40))
def test_counts_add_up_for_any_mixture(tmp_path_factory: pytest.TempPathFactory, kinds: list[str]) -> None:
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    good = [kind for kind in kinds if not kind.startswith("!")]
    if not good:
        with pytest.raises(DataError, match="no usable example"):
            collected([source(file, texts(*kinds))], max_bad=1)
        return
    found = collected([source(file, texts(*kinds))], max_bad=1)
    assert balanced(found.report)
    assert found.report.rows == len(kinds)
    assert found.report.kept_rows == len(good)
    assert found.examples == [part for kind in good for part in kind.split("|")]
    assert found.report.examples == len(found.examples) == len(found.weights)


def test_the_order_is_that_of_the_rows(tmp_path: Path) -> None:
    """Checks run in threads and some take longer; more rows than one round of them."""
    names = [f"{'slow ' if number % 97 == 0 else ''}row {number}" for number in range(1200)]
    assert collected([source(tmp_path / "a.jsonl", texts(*names))]).examples == names


def test_an_example_may_become_several(tmp_path: Path) -> None:
    found = collected([source(tmp_path / "a.jsonl", texts("a|b c|d", "e"), weight=1.5)])
    assert found.examples == ["a", "b c", "d", "e"]
    assert found.weights == [1.5] * 4
    assert (found.report.rows, found.report.kept_rows, found.report.examples) == (2, 2, 4)
    assert found.report.cost == 5


def test_a_row_that_gives_nothing_is_not_kept(tmp_path: Path) -> None:
    found = collected([source(tmp_path / "a.jsonl", texts("a", ""))], max_bad=1)
    assert (found.report.rows, found.report.kept_rows, sum(found.report.dropped.values())) == (2, 1, 1)
    assert found.report.dropped["empty"] == 1


def test_a_row_that_gives_nothing_is_named_by_its_place(tmp_path: Path) -> None:
    found = collected([source(tmp_path / "a.jsonl", texts("a", ""))], max_bad=1)
    assert found.report.named["empty"][0].startswith("a.jsonl:2: ")


def test_what_cannot_be_trained_on_may_be_evaluated(tmp_path: Path) -> None:
    file = source(tmp_path / "a.jsonl", texts("a", "?long", "b"))
    assert collected([file], max_bad=1).examples == ["a", "b"]
    assert collected([file], max_bad=1).report.dropped["long"] == 1
    assert collected([file], training=False, max_bad=0).examples == ["a", "?long", "b"]


def test_progress_counts_rows(tmp_path: Path) -> None:
    told: list[int] = []
    collected([source(tmp_path / "a.jsonl", texts("a", "!x", "b|c"))], told.append, max_bad=1)
    assert told == [1, 2, 3]


# ------------------------------------------------------------------------------------------------ policy


def test_raise_stops_at_the_first_bad_row_in_order(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with pytest.raises(BadExample) as caught:
        collected([source(file, texts("a", "!first", "b", "!second"))], on_bad="raise")
    assert caught.value.reason == "first"
    assert f"{file.name}:2: is marked as bad" in str(caught.value)
    assert "given:    !first" in str(caught.value)


def test_raise_also_for_what_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with pytest.raises(BadExample, match=r"a\.jsonl:2"):
        collected([source(file, [{"text": "a"}, "{broken\n", {"text": "b"}])], on_bad="raise")


@pytest.mark.parametrize(("bad", "allowed"), [(0, True), (1, True), (2, True), (3, False), (20, False)])
def test_skip_has_a_bound(tmp_path: Path, bad: int, allowed: bool) -> None:
    """10% of 20 rows are 2."""
    file = source(tmp_path / "a.jsonl", texts(*["good"] * (20 - bad), *["!noisy"] * bad))
    if allowed:
        assert collected([file], max_bad=0.1).report.dropped["noisy"] == bad
        return
    with pytest.raises(DataError, match="too many rows can't be used") as caught:
        collected([file], max_bad=0.1)
    message = str(caught.value)
    assert "data.train" in message
    assert f"{bad} noisy" in message
    assert "at most 10% of the rows" in message
    assert f"a.jsonl:{20 - bad + 1}: is marked as bad" in message  # the first of them, by place


def test_a_bound_of_nothing_and_of_everything(tmp_path: Path) -> None:
    file = source(tmp_path / "a.jsonl", texts("good", "!noisy"))
    with pytest.raises(DataError, match="too many"):
        collected([file], max_bad=0)
    assert collected([file], max_bad=1).examples == ["good"]


def test_no_usable_example(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable example") as caught:
        collected([source(tmp_path / "a.jsonl", texts("!noisy", "!short"))], max_bad=1)
    assert "2 rows, 0 examples" in str(caught.value)
    assert "1 noisy, 1 short" in str(caught.value)


def test_bad_rows_are_named_with_file_and_row_but_not_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    found = collected([source(file, texts("good", *["!noisy"] * 9, "!short"))], max_bad=1)
    named = found.report.named
    assert [line.split(": is")[0] for line in named["noisy"]] == [f"{file.name}:{row}" for row in range(2, 2 + SHOWN)]
    assert named["short"][0].startswith(f"{file.name}:11: ")
    assert found.report.dropped["noisy"] == 9


# ------------------------------------------------------------------------------------------------ report


def test_the_report_in_words_and_as_json(tmp_path: Path) -> None:
    report = collected([source(tmp_path / "a.jsonl", texts("one two|three", "!noisy"))], max_bad=1).report
    assert report.summary() == "2 rows, 2 examples, 3 words; dropped 1 noisy"
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["rows"] == plain["kept_rows"] + sum(plain["dropped"].values()) == 2
    assert (plain["examples"], plain["words"], plain["dropped"]) == (2, 3.0, {"noisy": 1})
    assert plain["named"]["noisy"][0].startswith("a.jsonl:2: ")


class Short(Words):
    """Keeps the first word of a text and counts the others; in training two examples of a source become one."""

    def notes(self, example: str) -> Mapping[str, int]:
        cut = len(example.split()) - 1
        return {"texts cut": 1, "words cut": cut} if cut else {}

    def arrange(self, examples: list[str], training: bool) -> list[str]:
        pairs = zip(examples[::2], examples[1::2], strict=False)
        return [f"{one} {other}" for one, other in pairs] if training else examples


def test_what_is_changed_in_examples_is_counted_too(tmp_path: Path) -> None:
    """Of the rows as they were checked, however they are arranged afterwards."""
    files = [
        source(tmp_path / "a.jsonl", texts("one two three", "!noisy", "four", "five|six seven", "eight")),
        source(tmp_path / "b.jsonl", texts("nine ten", "eleven"), weight=2),
    ]
    data = DataSection(train=("unused",), max_bad=1)
    report = collect(files, Short(), data, training=False).report
    assert report.noted == {"texts cut": 3, "words cut": 4}
    assert report.summary().endswith("; dropped 1 noisy; 3 texts cut, 4 words cut")
    assert report.as_dict()["noted"] == {"texts cut": 3, "words cut": 4}
    arranged = collect(files, Short(), data, training=True)
    assert arranged.report.noted == report.noted
    assert arranged.examples == ["one two three four", "five six seven", "nine ten eleven"]
    assert arranged.weights == [1, 1, 2]
    assert (arranged.report.rows, arranged.report.examples, arranged.report.cost) == (7, 3, 10)
