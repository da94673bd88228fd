from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Agree = Callable[..., None]


@pytest.fixture
def agree() -> Agree:
    """Two functions of tensors have the same value and the same gradients, to 1e-6 of the largest."""

    def check(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
        mine, other = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
        found, wanted = ours(*mine), theirs(*other)
        assert float(wanted.detach().abs()) > 1e-3
        assert float((found - wanted).detach().abs()) <= 1e-6 * max(1.0, float(wanted.detach().abs()))
        found.backward()
        wanted.backward()
        for place, (left, right) in enumerate(zip(mine, other, strict=True)):
            assert left.grad is not None
            assert right.grad is not None
            largest = float(right.grad.abs().max())
            assert largest > 1e-6, place
            assert float((left.grad - right.grad).abs().max()) <= 1e-6 * max(1.0, largest), place

    return check


class Given(nn.Module):
    """A model whose embeddings are what it is given, under a name."""

    def __init__(self, width: int, name: str = "given"):
        super().__init__()
        self.width, self.name = width, name
        self.device = torch.device("cpu")

    def get_embedding_dimension(self) -> int:
        return self.width

    def forward(self, features: dict[str, Any]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.name]}


@pytest.fixture
def given() -> type[Given]:
    return Given


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """Normal values in float64: `draw(8, 6, seed=1)`."""
    return random
