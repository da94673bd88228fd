"""What models share that embed queries and documents apart and then compare them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...common.data.processing import Batch
from ...common.task import LossSum, Predicted
from . import sections
from .base import EmbeddingTask
from .evaluation import families
from .evaluation.encoded import encoded
from .evaluation.names import METRICS, metrics_of
from .evaluation.pool_loss import pool_loss
from .gather import gathered, ranks
from .losses.summed import Summed
from .objectives import Facts
from .processing import EmbeddingProcessing


class RetrieverTask(EmbeddingTask):
    """A subclass says how texts become embeddings, how these are compared, and what each loss makes of them."""

    metrics: ClassVar[dict[str, str]] = METRICS

    processing: EmbeddingProcessing

    @property
    def similarity(self) -> Literal["cosine", "dot"] | None:
        """How two vectors are compared; None: a text has more than one."""
        return "cosine"

    def __init__(self, recipe: Any, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        own = [getattr(source, "loss", None) for source in recipe.data.train]
        self.losses = [recipe.task.loss if loss is None else loss for loss in own]
        """Of each training set."""

    @classmethod
    def make_processing(cls, recipe: Any, weights: Path | None = None) -> EmbeddingProcessing:
        return EmbeddingProcessing(recipe, weights)

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        return metrics_of(recipe.evaluate)

    @property
    def compares_ranks(self) -> bool:
        return any(map(gathers, self.losses))

    # ------------------------------------------------------------------ what a kind defines

    @abstractmethod
    def embed(self, data: dict[str, Any]) -> Tensor:
        """Embeddings [U, ...] of the texts of a batch."""

    @abstractmethod
    def compare(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Similarities [Q, M] of embeddings."""

    @abstractmethod
    def objective(self, section: Any, queries: Tensor, documents: Tensor, facts: Facts, data: dict[str, Any]) -> Summed:
        """A loss of embeddings; what is not known of a step from `facts` is in its batch `data`."""

    # ------------------------------------------------------------------ loss

    def texts(self, data: dict[str, Any]) -> dict[str, Tensor]:
        """What the model reads of a batch."""
        names = ("input_ids", "attention_mask", "token_type_ids", "prompt_lengths")
        return {name: data[name] for name in names if data.get(name) is not None}

    def loss(self, data: dict[str, Any]) -> LossSum:
        """The loss of the batch's data set; documents of all ranks are negatives where the loss gathers them."""
        found = self.embed(data)
        queries, documents, facts = found[data["queries"]], found[data["documents"]], Facts.of(data)
        section = self.losses[data["source"]]
        if any(map(gathers, self.losses)):  # by all ranks, whatever the loss of their batches
            everyone, all_facts = gathered(documents), facts.of_all_ranks() if ranks() > 1 else facts
            if gathers(section):
                documents, facts = everyone, all_facts
            else:
                documents = documents + 0.0 * everyone.sum()  # its gradient is waited for by the others
        summed = self.objective(section, queries, documents, facts, data)
        count = float(summed.count)
        penalties = {name: value * count for name, value in self.penalties(queries, found[data["documents"]]).items()}
        total = summed.total + sum(penalties.values(), start=summed.total.new_zeros(()))
        return LossSum(total, count, {name: float(value.detach()) for name, value in penalties.items() if name})

    def penalties(self, queries: Tensor, documents: Tensor) -> dict[str, Tensor]:
        """What is added to the mean loss of a batch, by name."""
        return {}

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Embeddings of each example's texts."""
        found = self.embed(batch.data).float().cpu()
        return Predicted(encoded(batch.data, found.numpy()))

    def score(self, records: Sequence[Any]) -> dict[str, Any]:
        """All metrics of an evaluation set, and the loss over a fixed pool of documents."""
        found = self.measured(families.families(self, records))
        loss = pool_loss(self, records)
        return found if loss is None else {**found, "loss": loss}

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        return families.samples(self, records, number)


def gathers(section: Any) -> bool:
    """Whether a loss takes the documents of all ranks as negatives."""
    wants = isinstance(section, sections.ContrastiveLoss) and section.gather and section.in_batch_negatives
    return wants and section.guide is None
