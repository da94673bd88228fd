"""Regularisers of sparse embeddings [N, V], one weight for each word of the vocabulary (SPLADE, arXiv:2205.04733).

The whole loss is that of the task + weight x regulariser of documents + weight x regulariser of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .summed import Summed, each


def flops(embeddings: Tensor, longest: int | None = None) -> Summed:
    """Expected number of multiplications of a search, smoothed (Paria et al., arXiv:2004.05665): the sum over V of the
    square of a word's mean absolute weight in the batch.

    It is one number of the whole batch, so a batch of N counts as N of it.

    Args:
        embeddings: [N, V]
        longest: embeddings with at most so many non-zero weights are let be, as zeros in the mean (arXiv:2504.14839).

    Returns:
        One value, N times the batch's, with count N.
    """
    if longest is not None:
        embeddings = embeddings * ((embeddings != 0).sum(dim=1, keepdim=True) > longest)
    loss = embeddings.abs().mean(dim=0).square().sum()[None]
    return Summed(loss * len(embeddings), torch.full_like(loss, len(embeddings), requires_grad=False))


def l1(embeddings: Tensor) -> Summed:
    """Sum of the absolute weights of each embedding [N, V]."""
    return each(embeddings.abs().sum(dim=1))
