"""Mistakes that `luthier check` finds before an embedding model or a reranker is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PAIRS = [{"anchor": f"ask a{at}", "positive": f"tell a{at} b{at}"} for at in range(8)]
SCORED = [{"sentence1": f"ask a{at}", "sentence2": f"tell b{at}", "score": at / 8} for at in range(8)]

# name: (kind, rows, overrides, what is said)
PLANTED: dict[str, tuple[str, list[Any], list[str], str]] = {
    "negatives that are positives": (
        "embedding.dense", [{**one, "negative": one["positive"]} for one in PAIRS], [],
        "a negative is a document that belongs to the query",
    ),
    "queries that are their documents": (
        "embedding.dense", [{**one, "positive": one["anchor"]} for one in PAIRS], [], "queries are their own documents",
    ),
    "one score only": (
        "embedding.dense", [{**one, "score": 0.5} for one in SCORED], ["task.loss.name=cosent"],
        "every row has the same score",
    ),
    "unknown columns": ("embedding.dense", [{"a": "b", "c": "d"}] * 3, [], "3 unknown_columns"),
    "empty text": ("embedding.dense", [{**one, "positive": " "} for one in PAIRS], [], "8 empty_text"),
    "score that is no number": ("embedding.dense", [{**one, "score": "high"} for one in SCORED], [], "8 not_a_number"),
    "prompt without room": (
        "embedding.dense", PAIRS, ["data.max_length=6", "data.prompts.query='query passage ask tell: '"],
        "a prompt leaves no room",
    ),
    "tokens as the size of a batch": ("embedding.dense", PAIRS, ["data.batch.tokens=100"], "each other's negatives"),
    "adapter target": ("embedding.dense", PAIRS, ["model.lora.target_modules=[q_proj]"], "q_proj"),
    "metric key": ("embedding.dense", PAIRS, ["checkpoint.best=spearman_cosine"], "checkpoint.best"),
    "roles that form no layout": (
        "embedding.dense", PAIRS, ["data.train=[{path: rows.jsonl, roles: {anchor: a}}]"], "roles",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str, recipe_of, failures) -> None:
    kind, rows, overrides, said = PLANTED[name]
    found = failures(lambda: recipe_of(*overrides, rows=rows, kind=kind))
    assert any(said in one for one in found), found
    # Without scores to tell apart there is no gradient either.
    assert len(found) == (2 if name == "one score only" else 1), "one mistake is one failure"


def test_training_pairs_among_the_validation_data_are_found(recipe_of, rows_of, failures, tmp_path: Path) -> None:
    held = rows_of(tmp_path / "held.jsonl", [PAIRS[5], {"anchor": "ask b1", "positive": "tell c1"}])
    found = failures(lambda: recipe_of(f"data.validation={held}", rows=PAIRS))
    assert len(found) == 1
    assert "data.validation: 1 of 2 examples, such as" in found[0]
