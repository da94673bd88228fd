"""MaxSim against sentence-transformers' ColBERT scores on the same token embeddings, forward and gradient."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.multi_vector_encoder.scoring import (
    colbert_kd_scores,
    colbert_scores,
    mean_colbert_kd_scores,
    mean_colbert_scores,
)
from torch import Tensor

from luthier.modalities.embedding.losses.multi_vector import EMPTY, maxsim, maxsim_lists

Q, T, M, U, D = 3, 4, 5, 6, 7


def masks(*shape: int, seed: int = 0) -> Tensor:
    """Lengths from 1 up: the first tokens of each."""
    lengths = torch.randint(1, shape[-1] + 1, shape[:-1], generator=torch.Generator().manual_seed(seed))
    return torch.arange(shape[-1]) < lengths[..., None]


@pytest.mark.parametrize("elements", [1, T * U, T * U * 7, 2**26], ids=["least", "pair", "some", "all at once"])
@pytest.mark.parametrize("mean", [False, True])
def test_all_documents(agree, draw, mean: bool, elements: int) -> None:
    weights = draw(Q, M, seed=5).float()
    asked, told = masks(Q, T), masks(M, U, seed=1)
    theirs = mean_colbert_scores if mean else colbert_scores
    agree(
        lambda ask, tell: (maxsim(ask, tell, asked, told, mean, elements) * weights).sum(),
        lambda ask, tell: (theirs(ask, tell[:, None], asked, told[:, None]) * weights).sum(),
        draw(Q, T, D).float(), draw(M, U, D, seed=1).float(),
    )  # fmt: skip


@pytest.mark.parametrize("elements", [1, 2**26])
@pytest.mark.parametrize("mean", [False, True])
def test_own_lists(agree, draw, mean: bool, elements: int) -> None:
    weights = draw(Q, M, seed=5).float()
    asked, told = masks(Q, T), masks(Q, M, U, seed=1)
    theirs = mean_colbert_kd_scores if mean else colbert_kd_scores
    agree(
        lambda ask, tell: (maxsim_lists(ask, tell, asked, told, mean, elements) * weights).sum(),
        lambda ask, tell: (theirs(ask, tell, asked, told) * weights).sum(),
        draw(Q, T, D).float(), draw(Q, M, U, D, seed=1).float(),
    )  # fmt: skip


def test_by_hand_and_padding_never_wins() -> None:
    """Two query tokens; the document's real token gives -1 and -2, its padding would give more."""
    queries = torch.tensor([[[1.0], [2.0], [9.0]]])
    documents = torch.tensor([[[-1.0], [5.0]]])
    found = maxsim(queries, documents, torch.tensor([[True, True, False]]), torch.tensor([[True, False]]))
    assert found.tolist() == [[-3.0]]


def test_a_document_without_tokens_is_below_all_and_has_no_gradient(draw) -> None:
    queries, documents = draw(1, 2, D).requires_grad_(), draw(2, 3, D).requires_grad_()
    told = torch.tensor([[True, True, True], [False, False, False]])
    scores = maxsim(queries, documents, torch.ones(1, 2, dtype=torch.bool), told)
    assert scores[0, 1] == EMPTY
    scores.sum().backward()
    assert documents.grad is not None
    assert documents.grad[0].any()
    assert not documents.grad[1].any()
    assert torch.isfinite(queries.grad).all()


def test_half_precision_sums_in_float32(draw) -> None:
    queries, documents = draw(Q, T, D).bfloat16(), draw(M, U, D, seed=1).bfloat16()
    asked, told = masks(Q, T), masks(M, U)
    found = maxsim(queries, documents, asked, told)
    assert found.dtype == torch.float32
    assert torch.equal(found, colbert_scores(queries, documents[:, None], asked, told[:, None]))
