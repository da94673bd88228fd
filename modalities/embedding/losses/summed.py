"""What a loss returns that is not divided yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Summed:
    """Losses and what they count; the loss of a step is the sum of all `values` over the sum of all `counts`.

    Args:
        values: [N] summed loss of each item (a pair, a triplet, a query with its list).
        counts: [N] how much each counts; an item that can't say anything has 0 in both.
    """

    values: Tensor
    counts: Tensor

    @property
    def total(self) -> Tensor:
        """Scalar sum."""
        return self.values.sum()

    @property
    def count(self) -> Tensor:
        """Scalar, what the sum counts."""
        return self.counts.sum()


def each(values: Tensor, counted: Tensor | None = None) -> Summed:
    """Each of values [N] counts as one; where `counted` [N] is false, as nothing, and it has no gradient."""
    if counted is None:
        return Summed(values, torch.ones_like(values, requires_grad=False))
    return Summed(values.masked_fill(~counted, 0.0), counted.to(values.dtype))


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: what is summed, or goes into an exponential, needs more digits than bfloat16 has."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
