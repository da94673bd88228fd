"""SPLADE's regularisers against sentence-transformers' SpladeLoss on the same embeddings."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.sparse_encoder import losses
from torch import Tensor

from luthier.modalities.embedding.losses.contrastive import contrastive, similarities
from luthier.modalities.embedding.losses.sparse import flops, l1

Q, V = 4, 9


@pytest.mark.parametrize("longest", [None, 4])
def test_equals_splade_loss(agree, draw, given, longest: int | None) -> None:
    base = losses.SparseMultipleNegativesRankingLoss(None, scale=1.0)
    theirs = losses.SpladeLoss(
        given(V), base, document_regularizer_weight=0.3, query_regularizer_weight=0.7,
        document_regularizer_threshold=longest, query_regularizer_threshold=longest,
    )  # fmt: skip
    positive = torch.eye(Q, dtype=torch.bool)
    if longest is not None:
        active = (draw(Q, V).relu() != 0).sum(dim=1)
        assert 0 < int((active > longest).sum()) < Q

    def ours(queries: Tensor, documents: Tensor) -> Tensor:
        queries, documents = queries.relu(), documents.relu()
        loss = contrastive(similarities(queries, documents, "dot"), positive, torch.ones_like(positive)).mean()
        terms = flops(documents, longest), flops(queries, longest)
        return loss + 0.3 * terms[0].total / terms[0].count + 0.7 * terms[1].total / terms[1].count

    def reference(queries: Tensor, documents: Tensor) -> Tensor:
        return sum(theirs([{"given": queries.relu()}, {"given": documents.relu()}]).values())

    agree(ours, reference, draw(Q, V), draw(Q, V, seed=1))


def test_by_hand() -> None:
    """Means of absolute weights (1.5, 2): 1.5^2 + 2^2; sums of the rows 1 + 4 and 2 + 0."""
    embeddings = torch.tensor([[1.0, -4.0], [2.0, 0.0]])
    found = flops(embeddings)
    assert float(found.total) == pytest.approx(2 * 6.25)
    assert float(found.count) == 2
    assert l1(embeddings).values.tolist() == [5, 2]
