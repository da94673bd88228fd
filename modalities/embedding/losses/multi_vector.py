"""Late interaction: every token has its embedding (ColBERT, Khattab & Zaharia, arXiv:2004.12832).

    MaxSim(query, document) = sum over query tokens of the maximum over document tokens of their inner product

Masked tokens neither add to the sum nor win the maximum. Sums are in float32. A document without any token scores
`EMPTY`, below every other. The scores go into `contrastive`, `kl_divergence` and `margin_mse` like any others.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = -1e9
ELEMENTS = 2**26
"""Products of tokens that are in memory at a time (256 MiB in float32). Autograd keeps only which token won."""


def maxsim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor,
    document_mask: Tensor,
    mean: bool = False,
    elements: int = ELEMENTS,
) -> Tensor:
    """Score of each query with each document.

    Args:
        queries: [Q, T, D]
        documents: [M, U, D]
        query_mask: [Q, T] bool, the tokens that count.
        document_mask: [M, U] bool
        mean: over the query's tokens rather than their sum.
        elements: bound of Q x T x M x U in memory; a single pair may exceed it.

    Returns:
        [Q, M] float32 (float64 of float64)
    """
    for_one = queries.shape[1] * documents.shape[1]
    columns = max(1, min(len(documents), elements // max(for_one, 1)))
    rows = max(1, min(len(queries), elements // max(for_one * columns, 1)))
    scores = [
        torch.cat(
            [
                _best(
                    torch.einsum("qtd,mud->qmtu", part, documents[at : at + columns]), document_mask[at : at + columns]
                )
                for at in range(0, len(documents), columns)
            ],
            dim=1,
        )
        for part in queries.split(rows)
    ]
    return _summed(torch.cat(scores), query_mask[:, None], document_mask[None], mean)


def maxsim_lists(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor,
    document_mask: Tensor,
    mean: bool = False,
    elements: int = ELEMENTS,
) -> Tensor:
    """Score of each query with each document of its own list.

    Args:
        queries: [Q, T, D]
        documents: [Q, L, U, D]
        query_mask: [Q, T] bool
        document_mask: [Q, L, U] bool; a place of the list that is empty scores `EMPTY`.

    Returns:
        [Q, L]
    """
    rows = max(1, elements // max(documents.shape[1] * documents.shape[2] * queries.shape[1], 1))
    parts = zip(queries.split(rows), documents.split(rows), document_mask.split(rows), strict=True)
    best = torch.cat([_best(torch.einsum("qtd,qlud->qltu", ask, tell), mask) for ask, tell, mask in parts])
    return _summed(best, query_mask[:, None], document_mask, mean)


def _best(products: Tensor, mask: Tensor) -> Tensor:
    """[Q, M, T, U], mask [M, U] or [Q, M, U] -> [Q, M, T], in float32 at least."""
    hidden = ~mask[..., None, :]
    best = products.masked_fill_(hidden, torch.finfo(products.dtype).min).max(dim=-1).values
    return best.to(torch.promote_types(best.dtype, torch.float32))


def _summed(best: Tensor, query_mask: Tensor, document_mask: Tensor, mean: bool) -> Tensor:
    """[Q, M, T], mask of tokens [Q, 1, T] -> [Q, M]"""
    scores = best.masked_fill(~query_mask, 0.0).sum(dim=-1)
    if mean:
        scores = scores / query_mask.sum(dim=-1).clamp(min=1)
    return scores.masked_fill(~document_mask.any(dim=-1), EMPTY)
