"""The loss on cut embeddings against sentence-transformers' MatryoshkaLoss around MultipleNegativesRankingLoss."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from torch import Tensor

from luthier.common.errors import ModelError
from luthier.modalities.embedding.losses.contrastive import contrastive, similarities
from luthier.modalities.embedding.losses.matryoshka import matryoshka, truncated

Q, D = 6, 8


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 0.25]])
def test_equals_matryoshka_loss(agree, draw, given, weights: list[float] | None) -> None:
    model, positive = given(D), torch.eye(Q, dtype=torch.bool)
    theirs = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [8, 4, 2], weights)

    def loss(cut: list[Tensor]) -> Tensor:
        return contrastive(similarities(*cut) * 20, positive, torch.ones_like(positive))

    agree(
        lambda *both: matryoshka(loss, both, [8, 4, 2], weights).mean(),
        lambda queries, documents: theirs([{"given": queries}, {"given": documents}], None),
        draw(Q, D), draw(Q, D, seed=1),
    )  # fmt: skip


def test_a_cut_is_the_first_dimensions_normalised() -> None:
    first, second = truncated(torch.tensor([[3.0, 4.0, 12.0]]), [3, 2])
    assert first[0].tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert second[0].tolist() == pytest.approx([0.6, 0.8])


def test_more_dimensions_than_there_are() -> None:
    with pytest.raises(ModelError, match="1 to 3"):
        truncated(torch.zeros(1, 3), [4])
