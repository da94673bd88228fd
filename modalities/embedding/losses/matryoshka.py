"""The same loss on the first dimensions of embeddings, so that they can be cut (Kusupati et al., arXiv:2205.13147)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from ....common.errors import ModelError


def truncated(embeddings: Tensor, dimensions: Sequence[int]) -> list[Tensor]:
    """The first d of the D dimensions of embeddings [N, D], normalised anew: a tensor [N, d] for each d."""
    for size in dimensions:
        if not 1 <= size <= embeddings.shape[-1]:
            raise ModelError(
                "an embedding can't be cut to more dimensions than it has",
                given=f"dimensions {list(dimensions)}",
                expected=f"1 to {embeddings.shape[-1]}",
            )
    return [functional.normalize(embeddings[..., :size], dim=-1) for size in dimensions]


def matryoshka(
    loss: Callable[[list[Tensor]], Tensor],
    embeddings: Sequence[Tensor],
    dimensions: Sequence[int],
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Sum over the dimensions of weight x loss of the cut embeddings; what it counts is what `loss` counts.

    Args:
        loss: from tensors, cut like `embeddings`, to a summed loss, such as [Q] of `contrastive`.
        embeddings: tensors [N, D], such as those of queries and of documents.
        dimensions: d of each cut, each at most D.
        weights: of each cut; default: all 1.
    """
    cuts = zip(*(truncated(tensor, dimensions) for tensor in embeddings), strict=True)
    parts = [w * loss(list(cut)) for w, cut in zip(weights or [1.0] * len(dimensions), cuts, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
