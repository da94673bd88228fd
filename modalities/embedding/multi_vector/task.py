"""Trains late-interaction models (ColBERT, arXiv:2004.12832)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....common.errors import ModelError
from ..losses.multi_vector import maxsim
from ..losses.summed import Summed
from ..model import Network, forbid_dropped, load
from ..objectives import Facts, contrastive, of_scores
from ..retriever import RetrieverTask
from ..sections import ContrastiveLoss
from .config import Config


class Task(RetrieverTask):
    """Trains a MultiVectorEncoder."""

    recipe: Config

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        from sentence_transformers import MultiVectorEncoder

        model = load(MultiVectorEncoder, recipe.model, weights)
        forbid_dropped(model, recipe.model)
        special = [part for part in model if getattr(part, "skiplist_words", None)]
        if special or getattr(model[0], "query_expansion", None):
            raise ModelError(
                "queries and documents are read differently by this model, which is not known here",
                where="model.path",
                given=recipe.model.path,
                do="take a model without query expansion and skipped words",
            )
        model.prompts = self.processing.prompts
        self.model = Network(
            model, "token_embeddings", recipe.data.batch.chunk_tokens, recipe.train.gradient_checkpointing
        )

    def exportable(self) -> Any:
        from ..export import MultiVectorExport

        return MultiVectorExport(self)

    @property
    def similarity(self) -> None:
        return None

    def embed(self, data: dict[str, Any]) -> Tensor:
        """[U, T, D + 1]: the last number of each token says whether it counts."""
        tokens, mask = self.model(self.texts(data))
        return torch.cat([tokens, mask[..., None].to(tokens.dtype)], dim=-1)

    def compare(self, queries: Tensor, documents: Tensor) -> Tensor:
        (asked, asks), (told, tells) = ((part[..., :-1], part[..., -1] > 0) for part in (queries, documents))
        return maxsim(asked, told, asks, tells)

    def objective(self, section: Any, queries: Tensor, documents: Tensor, facts: Facts, data: dict[str, Any]) -> Summed:
        similarity = self.compare(queries, documents)
        if isinstance(section, ContrastiveLoss):
            return contrastive(section, similarity, facts)
        return of_scores(section, similarity, facts)
