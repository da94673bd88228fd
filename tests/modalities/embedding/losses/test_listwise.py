"""Losses of rerankers against sentence-transformers' own, which see the logits through a model that has only those."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sentence_transformers.cross_encoder import CrossEncoder, losses
from torch import Tensor, nn
from torch.nn import functional

from luthier.modalities.embedding.losses import distill, listwise
from luthier.modalities.embedding.losses.summed import Summed

Q, L = 4, 6
GRADES = torch.tensor([[0, 1, 0, 3, 2, 0], [2, 0, 1, 0, 0, 3], [0, 0, 0, 1, 2, 3], [3, 2, 0, 0, 1, 0]])
"""The same grades in other places: each query has as many pairs as the others."""
WHOLE = torch.ones(Q, L, dtype=torch.bool)
SCHEMES = {
    "none": losses.NoWeightingScheme(),
    "ndcg1": losses.NDCGLoss1Scheme(),
    "ndcg2": losses.NDCGLoss2Scheme(),
    "lambda_rank": losses.LambdaRankScheme(),
    "ndcg2++": losses.NDCGLoss2PPScheme(),
}


class Judge(CrossEncoder):
    """A reranker whose logit of query "i" and document "j" is `logits[i, j]`."""

    num_labels = 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.logits: Tensor = torch.empty(0)

    def preprocess(self, pairs: list[tuple[str, str]], **_: Any) -> dict[str, Tensor]:
        return {"pairs": torch.tensor([[int(query), int(document)] for query, document in pairs])}

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        rows, columns = features["pairs"].T
        return {"scores": self.logits[rows, columns][:, None]}


@pytest.fixture
def judge() -> Judge:
    return Judge()


def mean(summed: Summed) -> Tensor:
    return summed.total / summed.count


def lists(loss: Any, judge: Judge, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Their loss of each query's documents where the mask is true."""
    judge.logits = logits
    places = [row.nonzero()[:, 0].tolist() for row in mask]
    texts = [str(query) for query in range(len(logits))], [[str(place) for place in row] for row in places]
    found: Tensor = loss(texts, [labels[row, at].float() for row, at in enumerate(places)])
    return found


@pytest.mark.parametrize("options", [{}, {"k": 2}, {"sigma": 2.5, "binary": False}], ids=["plain", "top 2", "natural"])
@pytest.mark.parametrize("weighing", SCHEMES)
def test_lambda_loss(agree, draw, judge: Judge, weighing: Any, options: dict[str, Any]) -> None:
    told = {name: value for name, value in options.items() if name != "binary"}
    log = "binary" if options.get("binary", True) else "natural"
    theirs = losses.LambdaLoss(judge, SCHEMES[weighing], reduction_log=log, **told)
    ours = listwise.lambda_loss
    if "k" in options and weighing != "ndcg1":  # whose pairs among the first 2 places would differ from query to query
        ordered = draw(1, L).sort(descending=True).values.float().expand(Q, L)
        logits = torch.zeros(Q, L).scatter_(1, GRADES.float().argsort(dim=1, descending=True, stable=True), ordered)
    else:
        logits = draw(Q, L).float()
    agree(
        lambda given: mean(ours(given, GRADES, WHOLE, weighing, **options)),
        lambda given: lists(theirs, judge, given, GRADES, WHOLE),
        logits,
    )


@pytest.mark.parametrize("weighing", SCHEMES)
def test_each_query_counts_once_however_long_its_list(agree, draw, judge: Judge, weighing: Any) -> None:
    """The mean over queries of what theirs gives for each by itself, and not theirs for all, where long lists rule."""
    mask = torch.arange(L)[None] < torch.tensor([6, 3, 2, 5])[:, None]
    labels = torch.tensor([[0, 1, 0, 3, 2, 0], [2, 0, 1, 9, 9, 9], [0, 1, 9, 9, 9, 9], [3, 2, 0, 0, 1, 9]])
    theirs = losses.LambdaLoss(judge, SCHEMES[weighing])

    def one_by_one(logits: Tensor) -> Tensor:
        rows = [slice(row, row + 1) for row in range(Q)]
        return torch.stack([lists(theirs, judge, logits[r], labels[r], mask[r]) for r in rows]).mean()

    logits = draw(Q, L).float()
    agree(lambda given: mean(listwise.lambda_loss(given, labels, mask, weighing)), one_by_one, logits)
    together = lists(theirs, judge, logits, labels, mask)
    assert abs(float(together) - float(one_by_one(logits))) > 1e-3


def test_rank_net(agree, draw, judge: Judge) -> None:
    theirs = losses.RankNetLoss(judge, sigma=1.5)
    agree(
        lambda given: mean(listwise.rank_net(given, GRADES, WHOLE, sigma=1.5)),
        lambda given: lists(theirs, judge, given, GRADES, WHOLE),
        draw(Q, L).float(),
    )


def ragged() -> tuple[Tensor, Tensor]:
    """Labels in falling order, as their ListMLE takes the order it is given, and a mask."""
    mask = torch.arange(L)[None] < torch.tensor([6, 3, 2, 5])[:, None]
    return GRADES.sort(dim=1, descending=True).values + torch.linspace(0.5, 0, L), mask


def test_list_net(agree, draw, judge: Judge) -> None:
    _, mask = ragged()
    agree(
        lambda given: mean(listwise.list_net(given, GRADES, mask)),
        lambda given: lists(losses.ListNetLoss(judge), judge, given, GRADES, mask),
        draw(Q, L).float(),
    )


@pytest.mark.parametrize("position_aware", [False, True])
def test_list_mle(agree, draw, judge: Judge, position_aware: bool) -> None:
    labels, mask = ragged()
    theirs = losses.PListMLELoss(judge) if position_aware else losses.ListMLELoss(judge)
    agree(
        lambda given: mean(listwise.list_mle(given, labels, mask, position_aware)),
        lambda given: lists(theirs, judge, given, labels, mask),
        draw(Q, L).float(),
    )


@pytest.mark.parametrize("position_aware", [False, True])
def test_list_mle_sorts_by_label(draw, position_aware: bool) -> None:
    logits, labels = draw(Q, L), draw(Q, L, seed=1)
    order = labels.argsort(dim=1, descending=True)
    found = listwise.list_mle(logits, labels, WHOLE, position_aware).values
    wanted = listwise.list_mle(logits.gather(1, order), labels.gather(1, order), WHOLE, position_aware).values
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    other = listwise.list_mle(logits, labels.flip(1), WHOLE, position_aware).values
    assert float((found - other).abs().min()) > 1e-3


def test_position_aware_weights_of_a_long_list_stay_finite() -> None:
    """2^300 is no float32; with equal scores the loss is sum of w_i ln(n - i + 1), w_i -> 2^-i."""
    logits = torch.zeros(1, 300, requires_grad=True)
    found = listwise.list_mle(logits, -torch.arange(300.0)[None], torch.ones(1, 300, dtype=torch.bool), True).total
    wanted = sum(2.0**-i * math.log(301 - i) for i in range(1, 100))
    assert float(found.detach()) == pytest.approx(wanted, rel=1e-5)
    found.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def pairs_of(count: int) -> list[list[str]]:
    return [["0"] * count, [str(at) for at in range(count)]]


def test_bce(agree, draw, judge: Judge) -> None:
    labels = torch.tensor([1, 0, 1, 0, 0, 1])
    theirs = losses.BinaryCrossEntropyLoss(judge, pos_weight=torch.tensor(3.0))

    def reference(logits: Tensor) -> Tensor:
        judge.logits = logits
        return theirs(pairs_of(L), labels)

    agree(lambda given: mean(listwise.bce(given, labels[None], WHOLE[:1], 3.0)), reference, draw(1, L))


def test_mse(agree, draw, judge: Judge) -> None:
    labels = draw(L, seed=1).float()

    def reference(logits: Tensor) -> Tensor:
        judge.logits = logits
        return losses.MSELoss(judge)(pairs_of(L), labels)

    agree(lambda given: mean(listwise.mse(given, labels[None], WHOLE[:1])), reference, draw(1, L).float())


def test_margin_mse_of_rerankers_is_that_of_distillation(agree, draw, judge: Judge) -> None:
    teacher = draw(Q, L, seed=1).float()
    texts = [[str(query) for query in range(Q)], *([str(at)] * Q for at in range(L))]

    def reference(logits: Tensor) -> Tensor:
        judge.logits = logits
        return losses.MarginMSELoss(judge)(texts, teacher)

    agree(lambda given: mean(distill.margin_mse(given, teacher, WHOLE)), reference, draw(Q, L).float())


def test_cross_entropy(agree, draw) -> None:
    labels = torch.tensor([2, 0, 1, 1])
    agree(
        lambda given: mean(listwise.cross_entropy(given, labels)),
        lambda given: functional.cross_entropy(given, labels),
        draw(Q, 3),
    )


def test_group_softmax_is_cross_entropy_of_the_positive(agree, draw) -> None:
    """As in FlagEmbedding's rerankers: the logits of a group as classes, the positive first."""
    labels = torch.tensor([1, 0, 0, 0, 0, 0]).expand(Q, L)
    agree(
        lambda given: mean(listwise.group_softmax(given, labels, WHOLE)),
        lambda given: functional.cross_entropy(given, torch.zeros(Q, dtype=torch.long)),
        draw(Q, L),
    )


def test_pointwise_losses_count_documents(draw) -> None:
    mask = torch.arange(L)[None] < torch.tensor([6, 3, 0, 1])[:, None]
    for loss in (listwise.bce, listwise.mse):
        found = loss(draw(Q, L), (GRADES > 0).double(), mask)
        assert found.counts.tolist() == [6, 3, 0, 1]
        assert found.values[2] == 0


@pytest.mark.parametrize(
    ("loss", "counts"),
    [(listwise.lambda_loss, [1, 0, 0, 0]), (listwise.rank_net, [1, 0, 0, 0]), (listwise.list_net, [1, 1, 0, 0]),
     (listwise.list_mle, [1, 1, 0, 0]), (listwise.group_softmax, [1, 0, 1, 0])],
)  # fmt: skip
def test_queries_that_say_nothing_do_not_count_and_have_no_gradient(draw, loss: Any, counts: list[int]) -> None:
    """Rows: two grades; twice the same; one document (a positive); none."""
    labels = torch.tensor([[1, 0, 5], [0, 0, 5], [1, 5, 5], [5, 5, 5]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    logits = draw(4, 3).requires_grad_()
    found = loss(logits, labels, mask)
    assert found.counts.tolist() == counts
    assert found.values[0] > 0
    found.total.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0].any()
    assert not logits.grad[2:].any()
    assert not logits.grad[~mask].any()


def test_padding_of_any_size_changes_nothing(draw) -> None:
    mask = torch.tensor([[True, True, True, False]])
    labels, logits = torch.tensor([[0, 2, 1, 7]]), draw(1, 4)
    for loss in (listwise.lambda_loss, listwise.rank_net, listwise.list_net, listwise.list_mle, listwise.group_softmax):
        found = loss(logits, labels, mask).values
        wanted = loss(logits[:, :3], labels[:, :3], mask[:, :3]).values
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
