"""Distillation against sentence-transformers' own losses; ragged lists against the same lists one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer import losses
from torch import Tensor

from luthier.modalities.embedding.losses import distill
from luthier.modalities.embedding.losses.pairs import cosines
from luthier.modalities.embedding.losses.summed import Summed

Q, L, D = 5, 4, 6


def mean(summed: Summed) -> Tensor:
    return summed.total / summed.count


def scored(queries: Tensor, *documents: Tensor) -> Tensor:
    """[Q, L] inner products with the documents of each column."""
    return torch.stack([(queries * column).sum(dim=-1) for column in documents], dim=1)


def test_margin_mse(agree, draw) -> None:
    teacher, mask = draw(Q, L, seed=9), torch.ones(Q, L, dtype=torch.bool)
    theirs = losses.MarginMSELoss(None)
    agree(
        lambda *given: mean(distill.margin_mse(scored(*given), teacher, mask)),
        lambda *given: theirs.compute_loss_from_embeddings(list(given), teacher),
        *[draw(Q, D, seed=seed) for seed in range(L + 1)],
    )


@pytest.mark.parametrize(("ours", "teachers"), [(1.0, None), (2.0, None), (0.5, 3.0)])
def test_kl_divergence(agree, draw, ours: float, teachers: float | None) -> None:
    teacher, mask = draw(Q, L, seed=9), torch.ones(Q, L, dtype=torch.bool)
    theirs = losses.DistillKLDivLoss(None, temperature=ours, teacher_temperature=teachers)
    agree(
        lambda *given: mean(distill.kl_divergence(scored(*given), teacher, mask, ours, teachers)),
        lambda *given: theirs.compute_loss_from_embeddings(list(given), teacher),
        *[draw(Q, D, seed=seed) for seed in range(L + 1)],
    )


@pytest.mark.parametrize("kind", ["mse", "l2", "cosine"])
def test_embedding_distance(agree, draw, kind: Any) -> None:
    teacher = draw(Q, D, seed=9)
    theirs = losses.EmbedDistillLoss(None, distance_metric=kind)
    agree(
        lambda student: mean(distill.embedding_distance(student, teacher, kind)),
        lambda student: theirs.compute_loss_from_embeddings([student], [teacher]),
        draw(Q, D),
    )


@pytest.mark.parametrize("loss", [distill.margin_mse, distill.kl_divergence])
def test_ragged_lists_are_each_as_without_padding(draw, loss: Any) -> None:
    scores, teacher = draw(4, L).requires_grad_(), draw(4, L, seed=1)
    lengths = [4, 2, 1, 0]
    mask = torch.arange(L)[None] < torch.tensor(lengths)[:, None]
    found = loss(scores, teacher, mask)
    found.total.backward()
    assert scores.grad is not None
    assert not scores.grad[~mask].any()
    assert not scores.grad[2:].any()
    for row, length in enumerate(lengths[:2]):
        alone = scores[row : row + 1, :length].detach().clone().requires_grad_()
        wanted = loss(alone, teacher[row : row + 1, :length], torch.ones(1, length, dtype=torch.bool))
        wanted.total.backward()
        assert float(found.values[row].detach()) == pytest.approx(float(wanted.total.detach()), rel=1e-12)
        assert float(found.counts[row]) == float(wanted.count)
        assert alone.grad is not None
        torch.testing.assert_close(scores.grad[row, :length], alone.grad[0], rtol=1e-12, atol=1e-12)
    assert found.values[2:].tolist() == found.counts[2:].tolist() == [0, 0]


def test_what_is_counted() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    zeros = torch.zeros(2, 3)
    assert distill.margin_mse(zeros, zeros, mask).counts.tolist() == [2, 1]
    assert distill.kl_divergence(zeros, zeros, mask).counts.tolist() == [1, 1]


def test_a_student_that_is_the_teacher_has_no_loss(draw) -> None:
    scores, mask = draw(3, 4), torch.ones(3, 4, dtype=torch.bool)
    assert float(distill.margin_mse(scores, scores, mask).total) == 0
    assert float(distill.kl_divergence(scores, scores, mask).total) == pytest.approx(0, abs=1e-12)
    assert cosines(scores, scores).tolist() == pytest.approx([1, 1, 1])
