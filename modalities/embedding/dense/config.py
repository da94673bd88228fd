"""The recipe of an embedding model that gives one vector for a text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ....common.recipe import listed_sources
from ..config import EmbeddingData, EmbeddingModel, EmbeddingRecipe, EmbeddingSource, EmbeddingTask
from ..sections import AnyLoss, ContrastiveLoss, Matryoshka


class DenseTask(EmbeddingTask):
    loss: AnyLoss = ContrastiveLoss()
    """How embeddings are trained: a name, or a name with its settings."""
    matryoshka: Matryoshka | None = None
    """Train beginnings of the embedding along with the whole."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """How embeddings are compared, in training and by the saved model."""


class DenseSource(EmbeddingSource):
    loss: AnyLoss | None = None
    """Loss of this data set; default: `task.loss`."""


DenseSources = Annotated[tuple[DenseSource, ...], BeforeValidator(listed_sources)]


class DenseData(EmbeddingData):
    train: DenseSources = Field(min_length=1)
    """Training data: a path, `{path, weight, name, roles, loss, ...}` or a list of them. A batch is of one of them."""


class Config(EmbeddingRecipe):
    task: DenseTask
    """What is trained, and by which loss."""
    model: EmbeddingModel
    """What it starts from, and which parts are trained."""
    data: DenseData
    """What it is trained and evaluated on, and what stands before each text."""
