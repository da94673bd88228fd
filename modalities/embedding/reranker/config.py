"""The recipe of a reranker."""

from __future__ import annotations

from ..config import EmbeddingRecipe, EmbeddingTask, RerankerModel
from ..sections import PointwiseLoss, RerankLoss


class RerankerTask(EmbeddingTask):
    loss: RerankLoss = PointwiseLoss()
    """How it is trained: a name, or a name with its settings."""


class Config(EmbeddingRecipe):
    task: RerankerTask
    """What is trained, and by which loss."""
    model: RerankerModel
    """What it starts from, and which parts are trained."""
