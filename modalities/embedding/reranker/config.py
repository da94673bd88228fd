"""The recipe of a reranker."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..config import EmbeddingRecipe, EmbeddingTask, RerankerModel
from ..sections import ClassLoss, PairMarginLoss, PointwiseLoss, RerankLoss


class RerankerTask(EmbeddingTask):
    loss: RerankLoss = PointwiseLoss()
    """How it is trained: a name, or a name with its settings."""
    first_stage: float = Field(0.0, ge=0)
    """The rows' `scores`, those of the model that found the documents, times this are added to the reranker's own, in
    training and evaluation: it starts from that model's order and learns what that one does not know. Whoever serves
    the reranker adds them too. 0: they are not added."""

    @model_validator(mode="after")
    def _scores_have_one_use(self) -> RerankerTask:
        if self.first_stage and isinstance(self.loss, ClassLoss | PairMarginLoss):
            raise ValueError(f"loss {self.loss.name} has no use for first_stage, which adds to a score of relevance")
        return self


class Config(EmbeddingRecipe):
    task: RerankerTask
    """What is trained, and by which loss."""
    model: RerankerModel
    """What it starts from, and which parts are trained."""
