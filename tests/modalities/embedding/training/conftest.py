"""Recipes of small models on rows of letters, and what their trainings leave."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common import reading

LETTERS = "abcdefgh"
BERT = {"embedding.dense": "BertModel", "embedding.sparse": "BertForMaskedLM", "embedding.multi_vector": "BertModel"}


def pair(number: int, negatives: int = 0) -> dict[str, Any]:
    """A query and a document of lengths of their own; the document repeats the query's words."""
    words = [LETTERS[(number + at * at) % 8] + str((number * 3 + at) % 8) for at in range(1 + number % 5)]
    row = {"anchor": f"ask {' '.join(words)}", "positive": f"tell {' '.join([*words, *words[: number % 3]])}"}
    if negatives:
        row["negatives"] = [f"tell {LETTERS[(number + at) % 8]}{at}" for at in range(1 + number % negatives)]
    return {**row, "topic": "even" if number % 2 == 0 else "odd"}


@pytest.fixture(scope="session")
def pairs() -> Callable[..., list[dict[str, Any]]]:
    """Rows of pairs, with up to so many negatives each."""

    def make(number: int, negatives: int = 0) -> list[dict[str, Any]]:
        return [pair(at, negatives) for at in range(number)]

    return make


def tree(model: Path, train: Path, output: Path, kind: str) -> dict[str, Any]:
    return {
        "task": {"kind": kind},
        "model": {"path": str(model)},
        "data": {"train": str(train), "workers": 0, "batch": {"examples": 4}},
        "optim": {"learning_rate": 1e-2, "schedule": "constant", "warmup": 0, "clip_norm": None},
        "train": {"epochs": 1, "accelerator": "cpu", "devices": 1, "log_every": 1, "threads": 1},
        "checkpoint": {"every": None, "keep_last": 99},
        "output": str(output),
    }


@pytest.fixture(scope="session")
def tree_of() -> Callable[..., Any]:
    """A recipe from its parts: folder of the model, file of rows, output, overrides."""

    def make(model: Path, train: Path, output: Path, *overrides: str, kind: str = "embedding.dense") -> Any:
        return reading.build(reading.override(tree(model, train, output, kind), overrides), "test.yaml")

    return make


@pytest.fixture
def recipe_of(bert_of, rows_of, pairs, tree_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A recipe for a small model on 12 pairs or the rows given; `model`: a folder, or changes of the small BERT."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # it would outlast the test
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)

    def make(
        *overrides: str,
        model: Path | dict[str, Any] | None = None,
        rows: Any = 12,
        kind: str = "embedding.dense",
        output: str = "run",
    ) -> Any:
        changes = (
            model if isinstance(model, dict) else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        )
        folder = (
            model if isinstance(model, Path) else bert_of(BERT.get(kind, "BertForSequenceClassification"), **changes)
        )
        given = pairs(rows) if isinstance(rows, int) else rows
        file = given if isinstance(given, Path) else rows_of(tmp_path / f"{output}.jsonl", given)
        return tree_of(folder, file, tmp_path / output, *overrides, kind=kind)

    return make
