"""The exercise on Python's own documentation: its pairs are the same each time, and no text is in two sets."""

from __future__ import annotations

import json
from pathlib import Path

from luthier.common import reading
from luthier.modalities.embedding.pydocs.functions import make_pairs, pairs


def test_no_text_occurs_twice_over_all_sets(tmp_path: Path) -> None:
    make_pairs(tmp_path, validation=50, test=100)
    read = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation", "test")
    }
    assert [len(read[name]) for name in ("validation", "test")] == [50, 100]
    rows = [row for part in read.values() for row in part]
    assert len(rows) == len(pairs()) > 1000
    for column in ("anchor", "positive"):
        assert len({row[column] for row in rows}) == len(rows)
    assert all("(" in row["anchor"] and len(row["positive"]) >= 16 for row in rows)


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        make_pairs(tmp_path / name, seed)
    texts = [(tmp_path / name / "test.jsonl").read_text() for name in ("one", "two", "other")]
    assert texts[0] == texts[1] != texts[2]


def test_its_recipes_are_valid() -> None:
    assert reading.load("embedding/pydocs").task.kind == "embedding.dense"
    assert reading.load("embedding/pydocs-reranker").task.kind == "embedding.reranker"
