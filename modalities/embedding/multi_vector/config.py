"""The recipe of a late-interaction model."""

from __future__ import annotations

from ..config import EmbeddingRecipe, EmbeddingTask, EncoderModel
from ..sections import ContrastiveLoss, ScoreLoss


class MultiVectorTask(EmbeddingTask):
    loss: ScoreLoss = ContrastiveLoss(temperature=1.0)
    """How embeddings are trained: a name, or a name with its settings. The similarity is the sum over the query's
    tokens of the largest cosine with a token of the document (MaxSim)."""


class Config(EmbeddingRecipe):
    task: MultiVectorTask
    """What is trained, and by which loss."""
    model: EncoderModel
    """What it starts from, a transformer or a late-interaction model, and which parts are trained."""
