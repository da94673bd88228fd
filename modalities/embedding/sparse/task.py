"""Trains sparse encoders (SPLADE, arXiv:2107.05720)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..losses.contrastive import similarities
from ..losses.sparse import flops, l1
from ..losses.summed import Summed
from ..model import Network, forbid_dropped, load
from ..objectives import Facts, contrastive, of_scores
from ..retriever import RetrieverTask
from ..sections import ContrastiveLoss
from .config import Config

REGULARIZERS = {"flops": flops, "l1": l1}


class Task(RetrieverTask):
    """Trains a SparseEncoder, or an adapter of it."""

    recipe: Config
    log_names = ("query_regularizer", "document_regularizer")

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        from sentence_transformers import SparseEncoder

        model = load(SparseEncoder, recipe.model, weights)
        forbid_dropped(model, recipe.model)
        model.prompts = self.processing.prompts
        self.model = Network(
            model, "sentence_embedding", recipe.data.batch.chunk_tokens, recipe.train.gradient_checkpointing
        )

    def exportable(self) -> Any:
        from ..export import SparseExport

        return SparseExport(self)

    @property
    def similarity(self) -> Literal["dot"]:
        return "dot"

    def embed(self, data: dict[str, Any]) -> Tensor:
        found: Tensor = self.model(self.texts(data))[0]
        return found

    def compare(self, queries: Tensor, documents: Tensor) -> Tensor:
        return similarities(queries, documents, "dot")

    def objective(self, section: Any, queries: Tensor, documents: Tensor, facts: Facts, data: dict[str, Any]) -> Summed:
        similarity = self.compare(queries, documents)
        if isinstance(section, ContrastiveLoss):
            return contrastive(section, similarity, facts)
        return of_scores(section, similarity, facts)

    def penalties(self, queries: Tensor, documents: Tensor) -> dict[str, Tensor]:
        """Mean regulariser of queries and documents, weighed as far as the training has come."""
        task = self.recipe.task
        mean = REGULARIZERS[task.regularizer]
        parts = {
            "query_regularizer": (mean(queries), task.query_weight),
            "document_regularizer": (mean(documents), task.document_weight),
        }
        return {name: part.total / part.count * weight * self._grown() for name, (part, weight) in parts.items()}

    def _grown(self) -> float:
        """Share of the regulariser's weight, from 0 to 1."""
        warm = self.recipe.task.regularizer_warmup * self.total_steps
        schedule: Any = self.lr_schedulers() if self._trainer is not None else None
        done = schedule.last_epoch if schedule is not None else self.total_steps
        return 1.0 if done >= warm else float(done / warm) ** 2
