"""The recipe of a sparse encoder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..config import EmbeddingRecipe, EmbeddingTask, EncoderModel
from ..sections import ContrastiveLoss, ScoreLoss


class SparseTask(EmbeddingTask):
    loss: ScoreLoss = ContrastiveLoss(temperature=1.0)
    """How embeddings are trained: a name, or a name with its settings."""
    regularizer: Literal["flops", "l1"] = "flops"
    """What keeps embeddings sparse: the work of a search (arXiv:2004.05665), or the sum of weights."""
    query_weight: float = Field(5e-5, ge=0)
    """Weight of the queries' regulariser."""
    document_weight: float = Field(3e-5, ge=0)
    """Weight of the documents' regulariser."""
    regularizer_warmup: float = Field(0.33, ge=0, le=1)
    """Share of the training over which these weights grow quadratically from 0, so that no word dies at once."""


class Config(EmbeddingRecipe):
    task: SparseTask
    """What is trained, and by which loss."""
    model: EncoderModel
    """What it starts from, a masked language model or a sparse encoder, and which parts are trained."""
