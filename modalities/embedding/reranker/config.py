"""The recipe of a reranker."""

from __future__ import annotations

from pydantic import Field

from ..config import EmbeddingEvaluate, EmbeddingRecipe, EmbeddingTask, RerankerModel
from ..sections import PointwiseLoss, RerankLoss


class RerankerTask(EmbeddingTask):
    loss: RerankLoss = PointwiseLoss()
    """How it is trained: a name, or a name with its settings."""


class RerankerEvaluate(EmbeddingEvaluate):
    first_stage: float = Field(0.0, ge=0)
    """The rows' `scores`, those of the model that found the documents, times this are added to the reranker's own, as a
    search engine's rescoring does. Whoever serves the reranker adds them too. 0: it orders the documents alone."""


class Config(EmbeddingRecipe):
    task: RerankerTask
    """What is trained, and by which loss."""
    model: RerankerModel
    """What it starts from, and which parts are trained."""
    evaluate: RerankerEvaluate = RerankerEvaluate()
    """When and how it is evaluated."""
