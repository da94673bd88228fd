"""Trains embedding models that give one vector for a text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ....common.errors import RecipeError
from .. import sections
from ..losses.contrastive import similarities
from ..losses.pairs import SoftmaxHead
from ..losses.summed import Summed
from ..model import Network, forbid_dropped, load
from ..objectives import ON_SCORES, Facts, contrastive, of_embeddings, of_scores
from ..retriever import RetrieverTask
from .config import Config
from .parts import arranged


class Task(RetrieverTask):
    """Trains a SentenceTransformer, or an adapter of it."""

    recipe: Config

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        from sentence_transformers import SentenceTransformer

        section = recipe.model
        model = arranged(load(SentenceTransformer, section, weights), section, recipe.task.similarity)
        forbid_dropped(model, section)
        model.prompts = self.processing.prompts
        self.model = Network(
            model, "sentence_embedding", recipe.data.batch.chunk_tokens, recipe.train.gradient_checkpointing
        )
        self._width = section.dimensions or model.get_embedding_dimension()
        self._check_sizes()
        self.heads = nn.ModuleDict(
            {
                str(at): SoftmaxHead(self._width, loss.classes)
                for at, loss in enumerate(self.losses)
                if isinstance(loss, sections.SoftmaxLoss)
            }
        )
        self._guides = {
            loss.guide: _guide(loss.guide, recipe) for loss in self.losses if getattr(loss, "guide", None) is not None
        }

    def exportable(self) -> Any:
        from ..export import TextExport

        return TextExport(self)

    # ------------------------------------------------------------------ what retrieval is made of

    @property
    def similarity(self) -> Literal["cosine", "dot"]:
        return self.recipe.task.similarity

    def embed(self, data: dict[str, Any]) -> Tensor:
        found: Tensor = self.model(self.texts(data))[0][:, : self._width]
        return found

    def compare(self, queries: Tensor, documents: Tensor) -> Tensor:
        return similarities(queries, documents, self.similarity)

    def objective(self, section: Any, queries: Tensor, documents: Tensor, facts: Facts, data: dict[str, Any]) -> Summed:
        at = partial(self._at, section, facts, data)
        nested = self.recipe.task.matryoshka
        if nested is None:
            return at(queries, documents, self._guide_scores(section, data))
        guide = self._guide_scores(section, data)
        parts = [at(queries[:, :size], documents[:, :size], guide) for size in nested.dimensions]
        weights = nested.weights or (1.0,) * len(parts)
        values = torch.stack([weight * part.values for weight, part in zip(weights, parts, strict=True)]).sum(dim=0)
        return Summed(values, parts[0].counts)

    def _at(
        self,
        section: Any,
        facts: Facts,
        data: dict[str, Any],
        queries: Tensor,
        documents: Tensor,
        guide: Tensor | None,
    ) -> Summed:
        """The loss at one size of the embeddings."""
        if isinstance(section, sections.ContrastiveLoss):
            return contrastive(section, self.compare(queries, documents), facts, guide)
        if isinstance(section, ON_SCORES):
            return of_scores(section, self.compare(queries, documents), facts)
        head = self.heads[str(data["source"])] if isinstance(section, sections.SoftmaxLoss) else None
        return of_embeddings(section, queries, documents, facts, head)

    def penalties(self, queries: Tensor, documents: Tensor) -> dict[str, Tensor]:
        """Nothing; but it reaches every classifier, whose gradient all ranks wait for whatever their batches are of."""
        if len(self.losses) < 2 or not len(self.heads):
            return {}
        return {"": sum((p.sum() * 0.0 for p in self.heads.parameters()), start=queries.new_zeros(()))}

    # ------------------------------------------------------------------ guide and sizes

    @torch.no_grad()
    def _guide_scores(self, section: Any, data: dict[str, Any]) -> Tensor | None:
        """[Q, M] similarities of a guide model, which reads the same tokens."""
        guide = self._guides.get(getattr(section, "guide", None))
        if guide is None:
            return None
        found = guide.to(self.device)(self.texts(data))[0]
        return similarities(found[data["queries"]], found[data["documents"]], "cosine")

    def _check_sizes(self) -> None:
        nested = self.recipe.task.matryoshka
        sizes = {**({"task.matryoshka.dimensions": nested.dimensions} if nested else {})}
        sizes["evaluate.dimensions"] = self.recipe.evaluate.dimensions
        for where, given in sizes.items():
            if given and max(given) > self._width:
                raise RecipeError(
                    "more dimensions than the embedding has",
                    where=where,
                    given=max(given),
                    expected=f"at most {self._width}",
                )
        if nested is not None and any(isinstance(loss, sections.SoftmaxLoss) for loss in self.losses):
            raise RecipeError(
                "the softmax loss has a classifier of one size", where="task.matryoshka", do="leave it out"
            )


def _guide(path: str, recipe: Config) -> Network:
    """A frozen model that reads the tokens of the trained one."""
    from sentence_transformers import SentenceTransformer

    section = recipe.model.model_copy(update={"path": path, "lora": None})
    guide = load(SentenceTransformer, section, None)
    own = load_tokenizer_vocabulary(recipe.model.path, recipe)
    if guide.tokenizer.get_vocab() != own:
        raise RecipeError(
            "the guide reads other tokens than the model",
            where="task.loss.guide",
            given=path,
            do="take one of its family",
        )
    return Network(guide.requires_grad_(False).eval(), "sentence_embedding", recipe.data.batch.chunk_tokens)


def load_tokenizer_vocabulary(path: str, recipe: Config) -> dict[str, int]:
    """Tokens and ids of a model's tokenizer."""
    from transformers import AutoTokenizer

    found: dict[str, int] = AutoTokenizer.from_pretrained(
        path, trust_remote_code=recipe.model.trust_remote_code
    ).get_vocab()
    return found
