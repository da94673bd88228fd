"""Losses of pairs and triplets against sentence-transformers' own, on the same embeddings, forward and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer import losses
from torch import Tensor

from luthier.modalities.embedding.losses import pairs
from luthier.modalities.embedding.losses.summed import Summed

B, D = 7, 5
LABELS = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0, 0.3], dtype=torch.float64)


def mean(summed: Summed) -> Tensor:
    return summed.total / summed.count


def test_cosent(agree, draw) -> None:
    theirs = losses.CoSENTLoss(None)
    agree(
        lambda left, right: mean(pairs.cosent(pairs.cosines(left, right), LABELS)),
        lambda *given: theirs.compute_loss_from_embeddings(list(given), LABELS),
        draw(B, D), draw(B, D, seed=1),
    )  # fmt: skip


@pytest.mark.parametrize("width", [6, 5], ids=["even", "odd"])
def test_angle(agree, draw, width: int) -> None:
    theirs = losses.AnglELoss(None)
    agree(
        lambda left, right: mean(pairs.cosent(pairs.angles(left, right), LABELS)),
        lambda *given: theirs.compute_loss_from_embeddings(list(given), LABELS),
        draw(B, width), draw(B, width, seed=1),
    )  # fmt: skip


def test_cosent_by_hand_and_what_it_counts() -> None:
    """Labels 1 > 0: one pair, log(1 + exp(2 (0.4 - 0.1))); equal labels ask for nothing."""
    close = torch.tensor([0.1, 0.4], dtype=torch.float64)
    found = pairs.cosent(close, torch.tensor([1.0, 0.0]), scale=2.0)
    assert float(mean(found)) == pytest.approx(math.log1p(math.exp(0.6)), abs=1e-12)
    assert float(found.count) == 2
    assert float(pairs.cosent(close, torch.tensor([1.0, 1.0])).total) == 0


def test_cosine_mse(agree, draw) -> None:
    theirs = losses.CosineSimilarityLoss(None)
    agree(
        lambda left, right: mean(pairs.cosine_mse(left, right, LABELS.float())),
        lambda *given: theirs.compute_loss_from_embeddings(list(given), LABELS),
        draw(B, D), draw(B, D, seed=1),
    )  # fmt: skip


def test_margin_contrastive(agree, draw) -> None:
    labels = torch.tensor([1, 0, 1, 0, 0, 1, 0])
    theirs = losses.ContrastiveLoss(None, margin=1.2)
    agree(
        lambda left, right: mean(pairs.margin_contrastive(left, right, labels, margin=1.2)),
        lambda *given: theirs.compute_loss_from_embeddings(list(given), labels),
        draw(B, D), draw(B, D, seed=1),
    )  # fmt: skip


def test_margin_contrastive_by_hand_in_euclidean_distance() -> None:
    """Distances 5 and 0.5: (25 + (1 - 0.5)^2) / 2; a pair of label 0 beyond the margin gives 0."""
    left, right = torch.tensor([[3.0, 4.0], [0.5, 0.0], [9.0, 0.0]]), torch.zeros(3, 2)
    found = pairs.margin_contrastive(left, right, torch.tensor([1, 0, 0]), margin=1.0, distance="euclidean")
    assert found.values.tolist() == pytest.approx([12.5, 0.125, 0.0])
    assert float(found.count) == 3


@pytest.mark.parametrize(("distance", "margin"), [("cosine", 0.7), ("euclidean", 1.0), ("manhattan", 2.0)])
def test_triplet(agree, draw, distance: Any, margin: float) -> None:
    metric = getattr(losses.TripletDistanceMetric, distance.upper())
    theirs = losses.TripletLoss(None, distance_metric=metric, triplet_margin=margin)
    agree(
        lambda *given: mean(pairs.triplet(*given, margin=margin, distance=distance)),
        lambda *given: theirs.compute_loss_from_embeddings(list(given), None),
        *[draw(B, D, seed=seed) for seed in range(3)],
    )


@pytest.mark.parametrize("product", [False, True])
def test_softmax_head(draw, given, product: bool) -> None:
    theirs = losses.SoftmaxLoss(given(D), D, 3, concatenation_sent_multiplication=product).double()
    ours = pairs.SoftmaxHead(D, 3, product=product).double()
    ours.load_state_dict({name: value for name, value in theirs.state_dict().items() if name.startswith("classifier")})
    left, right = draw(B, D).requires_grad_(), draw(B, D, seed=1).requires_grad_()
    labels = torch.tensor([0, 1, 2, 2, 1, 0, 0])
    found, wanted = mean(ours.loss(left, right, labels)), theirs([{"given": left}, {"given": right}], labels)
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)
    mine = torch.autograd.grad(found, [left, right, *ours.parameters()])
    other = torch.autograd.grad(wanted, [left, right, *theirs.classifier.parameters()])
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_the_classifier_is_parameters_that_come_back_from_a_state(draw) -> None:
    """faults 5: what the loss learns is in its state, so a resumed run has the same logits."""
    head, other = pairs.SoftmaxHead(D, 3), pairs.SoftmaxHead(D, 3)
    assert {name: tuple(value.shape) for name, value in head.named_parameters()} == {
        "classifier.weight": (3, 3 * D),
        "classifier.bias": (3,),
    }
    left, right = draw(B, D).float(), draw(B, D, seed=1).float()
    assert not torch.equal(head(left, right), other(left, right))
    other.load_state_dict(head.state_dict())
    assert torch.equal(head(left, right), other(left, right))
