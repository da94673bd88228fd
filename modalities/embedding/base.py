"""What every training of an embedding model or reranker shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...common import task
from ...common.evaluation.each import Each
from . import card
from .evaluation import benchmarks
from .evaluation.names import Of, by_slice, each
from .model import Network


class EmbeddingTask(task.Task):
    """Trains a model of sentence-transformers, or an adapter of it. A subclass loads it into `self.model`."""

    recipe: Any
    model: Network

    def __init__(self, recipe: Any, weights: Path | None = None):
        super().__init__(recipe, weights)
        if recipe.evaluate.mteb:
            benchmarks.load(recipe.evaluate.mteb)  # now: what it refuses, it refuses early

    def measured(self, families: Sequence[tuple[Sequence[Any], Of]]) -> dict[str, Any]:
        """The metrics of an evaluation set, by slice too; what measured them is kept for `each`."""
        self._families = families
        return by_slice(families, self.recipe.evaluate.slices, self._labels())

    def each(self, records: Sequence[Any]) -> list[Each]:
        section = self.recipe.evaluate
        return each(section.metrics, self._families, section.slices, self._labels())

    def _labels(self) -> list[str]:
        return [source.label for source in self.processing.sources]  # type: ignore[attr-defined]

    @property
    def parts(self) -> Any:
        """The model of sentence-transformers."""
        return self.model.parts

    def compile_parts(self) -> None:
        task.compile_layers(self.model.transformer)

    def measure(self) -> dict[str, float]:
        names = self.recipe.evaluate.mteb
        return benchmarks.measure(self.parts, benchmarks.load(names), self.recipe.evaluate.batch) if names else {}

    def save_pretrained(self, directory: Path) -> None:
        self.parts.max_seq_length = self.processing.limits["document"]  # type: ignore[attr-defined]
        self.parts.save_pretrained(str(directory), create_model_card=False)
        (directory / "README.md").write_text(card.card(self.recipe, type(self.parts).__name__), encoding="utf-8")
