"""Retrieval with smaller embeddings: fewer dimensions, 8 bits or 1 bit each. What a search index saves, and costs.

Quantisation is that of sentence-transformers: int8 divides the range of each dimension, over the documents, into 256
steps; binary keeps the sign. Queries are quantised like the documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .retrieval import KS, Kind, Values, finite, retrieval

Precision = Literal["float32", "int8", "binary"]
PRECISIONS: tuple[Precision, ...] = ("float32", "int8", "binary")


@dataclass(frozen=True)
class Row:
    """Retrieval with one size of embedding.

    Args:
        dimensions: kept of each embedding.
        precision: of each dimension.
        size: bytes of a document.
        values: metrics of each query, as `retrieval` gives them.
    """

    dimensions: int
    precision: Precision
    size: int
    values: Values

    @property
    def name(self) -> str:
        """`256/int8`"""
        return f"{self.dimensions}/{self.precision}"


def table(
    queries: Tensor,
    documents: Tensor,
    relevant: Sequence[Mapping[int, float]],
    dimensions: Sequence[int],
    precisions: Sequence[Precision] = PRECISIONS,
    ks: Sequence[int] = KS,
    kind: Kind = "cosine",
) -> list[Row]:
    """Metrics for each number of dimensions and each precision.

    Args:
        queries: [Q, D]
        documents: [M, D]
        relevant: of each query, index of a document -> grade.
        dimensions: sizes that embeddings are cut to, at most D each.
        precisions: of each size.
        ks: cutoffs.
        kind: cosine (embeddings are normalised after the cut) or inner product.
    """
    finite(queries, "queries")
    finite(documents, "documents")
    rows = []
    for size in dimensions:
        ask, tell = queries[:, :size].detach().float(), documents[:, :size].detach().float()
        if kind == "cosine":
            ask, tell = torch.nn.functional.normalize(ask, dim=-1), torch.nn.functional.normalize(tell, dim=-1)
        ranges = torch.stack([tell.amin(dim=0), tell.amax(dim=0)])
        for precision in precisions:
            values = retrieval(
                _seen(ask, precision, ranges), _seen(tell, precision, ranges), relevant, ks=ks, kind=kind
            )
            rows.append(Row(tell.shape[1], precision, _bytes(tell.shape[1], precision), values))
    return rows


def int8(embeddings: Tensor, ranges: Tensor) -> Tensor:
    """Codes [N, D], -128 to 127, of embeddings [N, D], given each dimension's smallest and largest value [2, D]."""
    codes = torch.floor((embeddings - ranges[0]) / _steps(ranges)).clamp(0, 255)
    return (codes - 128).to(torch.int8)


def _seen(embeddings: Tensor, precision: Precision, ranges: Tensor) -> Tensor:
    """What a search makes of the codes: int8 decoded, the sign of each dimension (whose inner product is D - 2 x the
    Hamming distance) as 1 and -1."""
    if precision == "binary":
        return torch.where(embeddings > 0, 1.0, -1.0)
    if precision == "int8":
        return (int8(embeddings, ranges).float() + 128) * _steps(ranges) + ranges[0]
    return embeddings


def _steps(ranges: Tensor) -> Tensor:
    steps = (ranges[1] - ranges[0]) / 255
    return torch.where(steps == 0, torch.ones_like(steps), steps)


def _bytes(dimensions: int, precision: Precision) -> int:
    return {"float32": 4 * dimensions, "int8": dimensions, "binary": -(-dimensions // 8)}[precision]
