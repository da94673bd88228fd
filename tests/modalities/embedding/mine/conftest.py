"""A small world of queries and documents, and mining in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from luthier.modalities.embedding.mine.settings import Settings

WORDS = ["ask", "tell", "query", "passage", *(f"{letter}{at}" for letter in "qd" for at in range(8))]
QUERIES, DOCUMENTS = 14, 60


def texts(number: int, seed: int) -> list[str]:
    """Distinct texts of 3 to 8 words of the small BERT's vocabulary."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < number:
        found[" ".join(draw.choices(WORDS, k=draw.randint(3, 8)))] = None
    return list(found)


@pytest.fixture(scope="session")
def world() -> list[dict[str, Any]]:
    """Rows with a query and one positive; the first query has three, in rows that are far apart."""
    queries, documents = texts(QUERIES, 1), texts(DOCUMENTS, 2)
    rows = [{"anchor": queries[at % QUERIES], "positive": document} for at, document in enumerate(documents)]
    for at, row in enumerate(rows):
        row["id"] = at
        if at >= QUERIES:
            row["anchor"] = f"{row['anchor']} {WORDS[at % len(WORDS)]} {at}"
    rows[20]["anchor"] = rows[40]["anchor"] = queries[0]
    return rows


@pytest.fixture(scope="session")
def sentence_model(sentence_model_of) -> Path:
    folder: Path = sentence_model_of(prompts={"query": "ask : ", "document": "tell : "})
    return folder


@pytest.fixture(scope="session")
def cross_encoder(bert_of) -> Path:
    folder: Path = bert_of("BertForSequenceClassification", num_labels=1)
    return folder


@pytest.fixture(scope="session")
def settings_in(world, rows_of, sentence_model: Path) -> Callable[..., Settings]:
    """Settings of a mining of the world in a folder, in small pieces; any of them changed."""

    def make(folder: Path, rows: list[dict[str, Any]] | None = None, **changes: Any) -> Settings:
        data = rows_of(folder / "data.jsonl", world if rows is None else rows)
        places = {"data": str(data), "output": folder / "mined.jsonl", "model": str(sentence_model)}
        small = {"negatives": 4, "last": 20, "batch": 8, "shard": 25, "piece": 24, "rescored_piece": 10}
        return Settings(**{**places, **small, "relative_margin": 0.0, **changes})

    return make


@pytest.fixture
def settings_of(tmp_path: Path, settings_in: Callable[..., Settings]) -> Callable[..., Settings]:
    """Settings in the test's own folder."""
    return partial(settings_in, tmp_path)


@pytest.fixture
def mined() -> Callable[..., list[dict[str, Any]]]:
    """Rows that a mining wrote."""

    def make(settings: Settings) -> list[dict[str, Any]]:
        from luthier.modalities.embedding.mine.run import mine

        mine(settings)
        return [json.loads(line) for line in settings.output.read_text(encoding="utf-8").splitlines()]

    return make
