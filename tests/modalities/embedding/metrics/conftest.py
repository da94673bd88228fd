from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor


class Encoded:
    """A sentence-transformers model, as its evaluators see it, that "encodes" the text "3" as row 3 of a tensor."""

    similarity_fn_name = "cosine"

    def __init__(self, embeddings: Tensor):
        self.embeddings = embeddings
        self.model_card_data = self

    def set_evaluation_metrics(self, *_: Any) -> None:
        pass

    def encode(self, texts: Sequence[str], convert_to_numpy: bool = False, **_: Any) -> Any:
        rows = self.embeddings[[int(text) for text in texts]]
        return rows.numpy() if convert_to_numpy else rows

    encode_query = encode_document = encode


@pytest.fixture
def encoded() -> type[Encoded]:
    return Encoded


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """Normal values in float64: `draw(8, 6, seed=1)`."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    return draw
