"""The multiple-negatives family against sentence-transformers' own, on the same embeddings, forward and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sentence_transformers.base.losses.merged_forward import column_merging_disabled
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score
from torch import Tensor, nn

from luthier.modalities.embedding.losses.contrastive import (
    contrastive,
    false_negatives,
    guided,
    hardness_of,
    joint,
    known_positives,
    similarities,
)

Q, D = 6, 8


def paired(queries: int, columns: int) -> tuple[Tensor, Tensor]:
    """Masks [Q, Q x columns]: which document is the query's positive, and which are its own at all."""
    positive = torch.zeros(queries, queries * columns, dtype=torch.bool)
    positive[:, :queries] = torch.eye(queries, dtype=torch.bool)
    return positive, torch.eye(queries, dtype=torch.bool).repeat(1, columns)


def everything(mask: Tensor) -> Tensor:
    return torch.ones_like(mask)


@pytest.mark.parametrize("columns", [1, 3], ids=["pairs", "two mined negatives"])
@pytest.mark.parametrize(("kind", "scale"), [("cosine", 20.0), ("dot", 1.0)])
def test_equals_multiple_negatives_ranking(agree, draw, columns: int, kind: Any, scale: float) -> None:
    positive, _ = paired(Q, columns)
    options = {} if kind == "cosine" else {"similarity_fct": dot_score}
    theirs = MultipleNegativesRankingLoss(None, scale=scale, **options)

    def ours(queries: Tensor, *documents: Tensor) -> Tensor:
        scores = similarities(queries, torch.cat(documents), kind) * scale
        return contrastive(scores, positive, everything(positive)).mean()

    inputs = [draw(Q, D, seed=seed) for seed in range(columns + 1)]
    agree(ours, lambda *given: theirs.compute_loss_from_embeddings(list(given), None), *inputs)


@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives", "all_negatives"])
def test_hardness_equals_theirs(agree, draw, mode: str) -> None:
    positive, own = paired(Q, 2)
    weighed = {"in_batch_negatives": ~own, "hard_negatives": own, "all_negatives": None}[mode]
    theirs = MultipleNegativesRankingLoss(None, hardness_mode=mode, hardness_strength=5.0)

    def ours(queries: Tensor, *documents: Tensor) -> Tensor:
        close = similarities(queries, torch.cat(documents))
        return contrastive(close * 20, positive, everything(positive), hardness_of(close, 5.0, weighed)).mean()

    inputs = [draw(Q, D, seed=seed) for seed in range(3)]
    agree(ours, lambda *given: theirs.compute_loss_from_embeddings(list(given), None), *inputs)


def test_both_directions_are_the_function_and_its_transpose(agree, draw) -> None:
    positive, _ = paired(Q, 2)
    theirs = MultipleNegativesRankingLoss(
        None, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    )

    def ours(queries: Tensor, *documents: Tensor) -> Tensor:
        scores = similarities(queries, torch.cat(documents)) * 20
        forward = contrastive(scores, positive, everything(positive)).sum() / positive.any(dim=1).sum()
        back = contrastive(scores.T, positive.T, everything(positive).T).sum() / positive.T.any(dim=1).sum()
        return (forward + back) / 2

    inputs = [draw(Q, D, seed=seed) for seed in range(3)]
    agree(ours, lambda *given: theirs.compute_loss_from_embeddings(list(given), None), *inputs)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(
    "directions",
    [("query_to_query",), ("document_to_query",), ("document_to_document",),
     ("query_to_query", "document_to_query", "document_to_document")],
)  # fmt: skip
def test_further_directions_in_one_softmax_equal_theirs(agree, draw, directions: Any, columns: int) -> None:
    positive, own = paired(Q, columns)
    names = tuple(name.replace("document", "doc") for name in directions)
    theirs = MultipleNegativesRankingLoss(None, directions=("query_to_doc", *names))

    def ours(queries: Tensor, *documents: Tensor) -> Tensor:
        found = joint(queries, torch.cat(documents), positive, everything(positive), own, directions)
        return contrastive(found.similarity * 20, found.positive, found.candidate).mean()

    inputs = [draw(Q, D, seed=seed) for seed in range(columns + 1)]
    agree(ours, lambda *given: theirs.compute_loss_from_embeddings(list(given), None), *inputs)


def test_queries_of_the_same_text_are_no_negatives_of_each_other(draw) -> None:
    queries = draw(3, D)
    queries[1] = queries[0]
    positive, own = paired(3, 1)
    same = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    given = (queries, draw(3, D, seed=1), positive, everything(positive), own, ("query_to_query", "document_to_query"))
    found = joint(*given, same_query=same).candidate[:, 3:]
    to_queries = torch.tensor([[0, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.bool)
    from_documents = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    assert torch.equal(found, torch.cat([to_queries, from_documents], dim=1))


def gist(given: type, margin: float, strategy: str, anchors: bool, positives: bool) -> Any:
    """Their loss without its tokenizers, on embeddings that are given."""
    loss = GISTEmbedLoss.__new__(GISTEmbedLoss)
    nn.Module.__init__(loss)
    loss.model, loss.guide = given(D), given(D, "guide")
    loss.must_retokenize = loss.gather_across_devices = False
    loss.temperature, loss.similarity_fct = 0.05, nn.CosineSimilarity(dim=-1)
    loss.margin_strategy, loss.margin = strategy, margin
    loss.contrast_anchors, loss.contrast_positives = anchors, positives
    loss.cross_entropy_loss = nn.CrossEntropyLoss()
    return loss


@pytest.mark.parametrize(("margin", "strategy"), [(0.0, "absolute"), (0.2, "absolute"), (0.5, "relative")])
@pytest.mark.parametrize("columns", [1, 2], ids=["pairs", "triplets"])
def test_guided_equals_gist(agree, draw, given, columns: int, margin: float, strategy: str) -> None:
    positive, _ = paired(Q, columns)
    theirs = gist(given, margin, strategy, anchors=False, positives=False)
    guides = [draw(Q, D, seed=10 + seed) for seed in range(columns + 1)]
    guides[1] = guides[0] + guides[1]
    judged = similarities(guides[0], torch.cat(guides[1:]))
    left_out = false_negatives(judged, positive, margin, strategy == "relative")
    assert left_out.any()
    assert not left_out.all(dim=1).any()

    def ours(queries: Tensor, *documents: Tensor) -> Tensor:
        scores = similarities(queries, torch.cat(documents)) / 0.05
        return guided(scores, positive, everything(positive), judged, margin, strategy == "relative").mean()

    def reference(*embeddings: Tensor) -> Tensor:
        with column_merging_disabled():
            columns = [{"given": own, "guide": guide} for own, guide in zip(embeddings, guides, strict=True)]
            return theirs(columns, None)

    agree(ours, reference, *[draw(Q, D, seed=seed) for seed in range(columns + 1)])


def test_guided_with_queries_and_documents_among_each_other_equals_gist(agree, draw, given) -> None:
    positive, own = paired(Q, 1)
    guides = [draw(Q, D, seed=10), draw(Q, D, seed=10) + draw(Q, D, seed=11)]
    directions = ("query_to_query", "document_to_document")
    judged = joint(*guides, positive, everything(positive), own, directions).similarity
    theirs = gist(given, 0.0, "absolute", anchors=True, positives=True)

    def ours(*embeddings: Tensor) -> Tensor:
        found = joint(*embeddings, positive, everything(positive), own, directions)
        return guided(found.similarity / 0.05, found.positive, found.candidate, judged).mean()

    def reference(*embeddings: Tensor) -> Tensor:
        return theirs([{"given": own, "guide": guide} for own, guide in zip(embeddings, guides, strict=True)], None)

    agree(ours, reference, draw(Q, D), draw(Q, D, seed=1))


def test_several_positives_do_not_push_each_other_away() -> None:
    """By hand: positives e^2 and e^1, negatives e^0 and e^-1; the loss is the mean of two cross-entropies."""
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    positive = torch.tensor([[True, True, False, False]])
    others = math.exp(0) + math.exp(-1)
    wanted = -(math.log(math.exp(2) / (math.exp(2) + others)) + math.log(math.exp(1) / (math.exp(1) + others))) / 2
    loss = contrastive(scores, positive, torch.ones_like(positive))
    assert loss.tolist() == pytest.approx([wanted], abs=1e-12)
    loss.sum().backward()
    assert scores.grad is not None
    miss = [others / (math.exp(2) + others), others / (math.exp(1) + others)]
    weights = [math.exp(0) / others, math.exp(-1) / others]
    slope = [-miss[0] / 2, -miss[1] / 2, *(sum(miss) / 2 * weight for weight in weights)]
    assert scores.grad[0].tolist() == pytest.approx(slope, abs=1e-9)


def test_without_negatives_or_positives_the_loss_is_zero_with_a_gradient_of_zero() -> None:
    """faults 14: an empty list of negatives; rows: no candidates, a lone positive that is a candidate, no positive."""
    scores = torch.randn(3, 2, requires_grad=True)
    positive = torch.tensor([[True, False], [True, False], [False, False]])
    candidate = torch.tensor([[False, False], [True, False], [True, True]])
    loss = contrastive(scores, positive, candidate)
    assert loss.tolist() == [0, 0, 0]
    loss.sum().backward()
    assert scores.grad is not None
    assert not scores.grad.any()


def test_ragged_negatives_are_a_mask(draw) -> None:
    """faults 10: query 0 has two mined negatives, query 1 none; in-batch negatives off."""
    scores = draw(2, 4)
    positive = torch.tensor([[True, False, False, False], [False, False, False, True]])
    candidate = torch.tensor([[True, True, True, False], [False, False, False, True]])
    found = contrastive(scores, positive, candidate)
    wanted = torch.nn.functional.cross_entropy(scores[:1, :3], torch.tensor([0]))
    assert found.tolist() == pytest.approx([float(wanted), 0.0], abs=1e-8)


def test_a_duplicate_of_the_positive_is_no_false_negative() -> None:
    """faults 1: of four pairs, two have the same document; a perfect model has loss 0, not 2 ln 2 / 4 = 0.35."""
    queries = torch.eye(4, dtype=torch.float64)
    queries[1] = queries[0]
    documents, keys, positive = queries.clone(), torch.tensor([7, 7, 8, 9]), torch.eye(4, dtype=torch.bool)
    known = known_positives(keys, torch.tensor([[7, -1], [7, -1], [8, -1], [9, 3]]))
    assert torch.equal(known, keys[:, None] == keys)
    scores = similarities(queries, documents) * 100
    assert float(contrastive(scores, positive, ~known).sum()) == pytest.approx(0.0, abs=1e-12)
    theirs = MultipleNegativesRankingLoss(None, scale=100.0).compute_loss_from_embeddings([queries, documents], None)
    assert float(theirs) == pytest.approx(math.log(2) / 2, abs=1e-6)


def test_padding_is_not_a_known_positive() -> None:
    assert not known_positives(torch.tensor([-1, 4]), torch.tensor([[-1, -1]])).any()
    assert known_positives(torch.tensor([5, 4, 5]), torch.tensor([[-1, 5], [4, 5]])).tolist() == [
        [True, False, True],
        [True, True, True],
    ]


def test_false_negatives_are_those_above_the_best_positive_less_the_margin() -> None:
    close = torch.tensor([[0.5, 0.8, 0.75, 0.95], [0.1, 0.2, 0.3, 0.4]])
    positive = torch.tensor([[True, True, False, False], [False, False, False, False]])
    assert false_negatives(close, positive).tolist() == [[False, False, False, True], [False] * 4]
    assert false_negatives(close, positive, 0.1).tolist()[0] == [False, False, True, True]
    assert not false_negatives(close, positive, -0.2).any()
    assert false_negatives(close, positive, 0.05, relative=True).tolist()[0] == [False, False, False, True]
    assert false_negatives(close, positive, 0.1, relative=True).tolist()[0] == [False, False, True, True]


def test_the_loss_of_a_fixed_pool_does_not_depend_on_the_batch_size(draw) -> None:
    """faults 9: queries in batches of any size against the same documents give the same sum; in-batch pools do not."""
    positive, _ = paired(Q, 1)
    scores = similarities(draw(Q, D), draw(Q, D, seed=1)) * 20
    whole = contrastive(scores, positive, everything(positive)).sum()
    for size in (1, 2, 4):
        parts = [contrastive(*(part.split(size)[at] for part in (scores, positive, everything(positive)))).sum()
                 for at in range(math.ceil(Q / size))]  # fmt: skip
        assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)
    pools = sum(contrastive(scores[a:b, a:b], positive[a:b, a:b], everything(positive[a:b, a:b])).sum()
                for a, b in ((0, 2), (2, 4), (4, 6)))  # fmt: skip
    assert float(pools) < 0.9 * float(whole)


def test_the_sum_over_ranks_has_the_gradient_of_the_whole_batch(draw) -> None:
    """faults 3: each rank's queries against all documents, summed over ranks and divided by all queries: ratio 1."""
    positive, _ = paired(Q, 1)
    gradients = []
    for ranks in (1, 2, 3):
        queries, documents = draw(Q, D).requires_grad_(), draw(Q, D, seed=1).requires_grad_()
        for rows in torch.arange(Q).chunk(ranks):
            scores = similarities(queries[rows], documents) * 20
            (contrastive(scores, positive[rows], everything(positive[rows])).sum() / Q).backward()
        gradients.append(torch.cat([queries.grad, documents.grad]))
    assert float(gradients[0].abs().max()) > 1e-2
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-12, atol=1e-12)


def test_similarities_keep_float32_under_autocast(draw) -> None:
    queries, documents = draw(4, D).float(), draw(5, D, seed=1).float()
    wanted = similarities(queries, documents)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = similarities(queries, documents)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)
    assert similarities(queries.bfloat16(), documents.bfloat16()).dtype == torch.float32
