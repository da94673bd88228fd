"""The sections of embedding recipes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from luthier.modalities.embedding.config import EmbeddingRecipe, RerankerModel


def tree(**data: Any) -> dict[str, Any]:
    return {
        "task": {"kind": "embedding.test"},
        "model": {"path": "model"},
        "data": {"train": "pairs.jsonl", **data},
        "output": "run",
    }


def read(**data: Any) -> EmbeddingRecipe:
    return EmbeddingRecipe.model_validate(tree(**data))


def test_defaults() -> None:
    recipe = read()
    batch = recipe.data.batch
    assert (batch.examples, batch.bucket_batches, batch.budget(), batch.packed) == (32, 0, None, False)
    assert recipe.evaluate.batch == 32
    assert recipe.evaluate.metrics == ("retrieval",)
    assert recipe.data.train[0].roles is None
    assert recipe.data.max_length is None


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"tokens": 4096}, "bounded by its examples"),
        ({"bucket_batches": 100}, "must be 0"),
        ({"chunk_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_what_would_change_the_batches_is_refused(batch: dict[str, Any], problem: str) -> None:
    """Fault 11: grouping by length was accepted and ignored."""
    with pytest.raises(ValidationError, match=problem):
        read(batch=batch)


def test_sources_in_all_their_forms() -> None:
    roles = {"anchor": "title", "positive": "body", "negatives": ["a", "b"]}
    recipe = read(train=["a.jsonl", {"path": "b.jsonl", "weight": 2, "roles": roles}], validation="c.jsonl")
    assert [source.path for source in recipe.data.train] == ["a.jsonl", "b.jsonl"]
    assert recipe.data.train[1].roles.declared() == {**roles, "negatives": ("a", "b")}
    assert recipe.data.validation[0].query_prompt is None
    assert EmbeddingRecipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ({"anchr": "title", "positive": "body"}, r"roles\.anchr[^$]*Extra inputs are not permitted"),
        ({"anchor": "title"}, "don't belong together"),
        ({"anchor": ["a", "b"], "positive": "body"}, r"roles\.anchor[^$]*should be a valid string"),
    ],
)
def test_roles_are_checked_before_any_data_is_read(roles: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        read(train={"path": "a.jsonl", "roles": roles})


@pytest.mark.parametrize("template", ["{query}", "{document} {query}", "{query} {document} {document}"])
def test_a_template_needs_both_places_in_order(template: str) -> None:
    with pytest.raises(ValidationError, match=r"needs .query. and, after it, .document."):
        RerankerModel(path="model", template=template)
