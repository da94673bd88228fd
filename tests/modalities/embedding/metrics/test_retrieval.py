"""Ranking metrics: sentence-transformers' and scikit-learn's where nothing ties, all orders by hand where it does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator, RerankingEvaluator
from sentence_transformers.util import cos_sim, dot_score
from sklearn.metrics import ndcg_score
from torch import Tensor

from luthier.common.errors import DataError, ModelError
from luthier.modalities.embedding.metrics.retrieval import mean, nearest, reranking, retrieval

KS = (1, 3, 10, 50)
Q, M, D = 12, 40, 6


def relevance(seed: int = 0) -> list[dict[int, float]]:
    """One to five documents of each query, with grades 1 to 3."""
    chance = np.random.default_rng(seed)
    return [{int(at): float(chance.integers(1, 4)) for at in chance.choice(M, chance.integers(1, 6), replace=False)}
            for _ in range(Q)]  # fmt: skip


@pytest.mark.parametrize("kind", ["cosine", "dot"])
@pytest.mark.parametrize("elements", [1, 100, 2**20], ids=["a query at a time", "two", "all"])
def test_equals_the_information_retrieval_evaluator(draw, encoded, kind: Any, elements: int) -> None:
    queries, documents = draw(Q, D), draw(M, D, seed=1)
    grades = [dict.fromkeys(row, 1.0) for row in relevance()]
    judge = InformationRetrievalEvaluator(
        {str(at): str(at) for at in range(Q)},
        {f"d{at}": str(Q + at) for at in range(M)},
        {str(at): {f"d{place}" for place in row} for at, row in enumerate(grades)},
        score_functions={kind: cos_sim if kind == "cosine" else dot_score},
        mrr_at_k=list(KS), ndcg_at_k=list(KS), accuracy_at_k=list(KS), precision_recall_at_k=list(KS),
        map_at_k=list(KS), show_progress_bar=False, write_csv=False,
    )  # fmt: skip
    wanted = judge(encoded(torch.cat([queries, documents])))
    found = mean(retrieval(queries, documents, grades, KS, kind, elements))
    assert {f"{kind}_{name}" for name in found} == set(wanted)
    assert 0.05 < found["ndcg@10"] < 0.95
    for name, value in found.items():
        assert value == pytest.approx(float(wanted[f"{kind}_{name}"]), abs=1e-6), name


def scores_of(queries: Tensor, documents: Tensor) -> np.ndarray:
    found: np.ndarray = (queries @ documents.T).numpy()
    return found


def test_graded_ndcg_equals_scikit_learn(draw) -> None:
    queries, documents, grades = draw(Q, D), draw(M, D, seed=1), relevance()
    truth = np.array([[row.get(at, 0.0) for at in range(M)] for row in grades])
    found = retrieval(queries, documents, grades, KS, "dot")
    for k in KS:
        for row in range(Q):
            wanted = ndcg_score(truth[row : row + 1], scores_of(queries[row : row + 1], documents), k=k)
            assert found[f"ndcg@{k}"][row] == pytest.approx(wanted, abs=1e-6)


def plain(grades: list[float], ideal: list[float], k: int) -> dict[str, float]:
    """The metrics of one order of documents, by their definitions."""
    hits = [grade > 0 for grade in grades[:k]]
    total = sum(grade > 0 for grade in ideal)

    def dcg(row: list[float]) -> float:
        return sum(grade / math.log2(2 + at) for at, grade in enumerate(row[:k]))

    first = next((at + 1 for at, hit in enumerate(hits) if hit), None)
    return {
        f"ndcg@{k}": dcg(grades) / dcg(sorted(ideal, reverse=True)),
        f"mrr@{k}": 1 / first if first else 0.0,
        f"recall@{k}": sum(hits) / total,
        f"precision@{k}": sum(hits) / k,
        f"map@{k}": sum(sum(hits[: at + 1]) / (at + 1) for at in range(len(hits)) if hits[at]) / min(k, total),
        f"accuracy@{k}": float(any(hits)),
    }


@pytest.mark.parametrize("k", [1, 2, 4, 6, 9])
@pytest.mark.parametrize(
    ("scores", "grades"),
    [
        ([0.5] * 6, [1, 0, 0, 0, 0, 0]),
        ([0.5] * 6, [0, 2, 0, 1, 0, 1]),
        ([0.9, 0.5, 0.5, 0.5, 0.2, 0.2], [0, 1, 0, 3, 2, 0]),
        ([0.9, 0.9, 0.5, 0.5, 0.5, 0.1], [1, 0, 1, 1, 0, 1]),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [1, 0, 0, 2, 0, 0]),
    ],
)
def test_ties_give_the_mean_over_all_their_orders(scores: list[float], grades: list[float], k: int) -> None:
    orders = [order for order in itertools.permutations(range(6))
              if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))]  # fmt: skip
    rows = [plain([grades[at] for at in order], grades, k) for order in orders]
    found = reranking([scores], [grades], [k])
    assert {name: float(column[0]) for name, column in found.items()} == pytest.approx(
        {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}, abs=1e-12
    )


def test_tied_scores_do_not_depend_on_the_order_of_the_documents() -> None:
    """faults 15: all scores equal; what chance gives, not 0 where the relevant one is last and 1 where it is first."""
    first = reranking([[0.5] * 4], [[1, 0, 0, 0]], [1, 4])
    last = reranking([[0.5] * 4], [[0, 0, 0, 1]], [1, 4])
    assert {name: column.tolist() for name, column in first.items()} == {
        name: column.tolist() for name, column in last.items()
    }
    assert first["mrr@4"].tolist() == pytest.approx([(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4])
    assert first["recall@1"].tolist() == first["accuracy@1"].tolist() == [0.25]
    assert first["ndcg@4"].tolist() == pytest.approx([sum(1 / math.log2(1 + p) for p in (1, 2, 3, 4)) / 4])
    assert first["ndcg@4"].tolist() == pytest.approx([ndcg_score([[1, 0, 0, 0]], [[0.5] * 4], k=4)])


@pytest.mark.parametrize("documents", [37, 1001, 20011])
def test_a_collapsed_model_scores_what_chance_scores(draw, documents: int) -> None:
    """The same embedding for every text, whatever the products' last bits do: recall@k = k / M for any document."""
    same = draw(1, 37).float().expand(documents, 37)
    rows = [0, documents // 2, documents - 1]
    found = retrieval(draw(3, 37, seed=1).float(), same, [{row: 1.0} for row in rows], [10])
    assert found["recall@10"].tolist() == pytest.approx([10 / documents] * 3, rel=1e-12)


def test_tied_ndcg_of_a_search_equals_scikit_learn() -> None:
    """Integers, so that products are exact and many tie; scikit-learn's takes the mean over ties too."""
    chance = np.random.default_rng(3)
    queries, documents = (torch.tensor(chance.integers(0, 2, (rows, 4))).float() for rows in (Q, M))
    grades = relevance()
    truth = np.array([[row.get(at, 0.0) for at in range(M)] for row in grades])
    found = retrieval(queries, documents, grades, KS, "dot")
    assert len(np.unique(scores_of(queries, documents))) < 6
    for k in KS:
        wanted = [
            ndcg_score(truth[row : row + 1], scores_of(queries[row : row + 1], documents), k=k) for row in range(Q)
        ]
        assert found[f"ndcg@{k}"].tolist() == pytest.approx(wanted, abs=1e-9)


def test_reranking_equals_the_reranking_evaluator(draw, encoded) -> None:
    rows = draw(Q + M, D)
    lists = [(list(range(1 + at % 3)), list(range(5, 9 + at % 4))) for at in range(Q)]
    samples = [
        {"query": str(at), "positive": [str(Q + p) for p in good], "negative": [str(Q + n) for n in bad]}
        for at, (good, bad) in enumerate(lists)
    ]
    wanted = RerankingEvaluator(samples, at_k=5, write_csv=False)(encoded(rows))
    scores = [
        cos_sim(rows[at], rows[[Q + p for p in (*good, *bad)]])[0].tolist() for at, (good, bad) in enumerate(lists)
    ]
    found = mean(reranking(scores, [[1.0] * len(good) + [0.0] * len(bad) for good, bad in lists], [5, 100]))
    assert found["mrr@5"] == pytest.approx(float(wanted["mrr@5"]), abs=1e-6)
    assert found["ndcg@5"] == pytest.approx(float(wanted["ndcg@5"]), abs=1e-6)
    assert found["map@100"] == pytest.approx(float(wanted["map"]), abs=1e-6)


def test_relevant_documents_outside_the_list_are_missed_but_part_of_the_ideal() -> None:
    found = reranking([[0.9, 0.1], [0.9, 0.1]], [[1, 0], [0, 0]], [2], missed=[[1.0], [2.0, 0.0]])
    assert found["recall@2"].tolist() == [0.5, 0.0]
    assert found["ndcg@2"].tolist() == pytest.approx([1 / (1 + 1 / math.log2(3)), 0.0])
    assert found["mrr@2"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(draw, bad: float) -> None:
    """faults 15: NaN says where, and does not crash or rank anywhere."""
    queries, documents = draw(2, D), draw(3, D, seed=1)
    documents[2, 1] = bad
    with pytest.raises(ModelError, match=r"documents, row 2.*not finite"):
        retrieval(queries, documents, [{0: 1.0}, {1: 1.0}])
    with pytest.raises(ModelError, match=r"query 1.*not finite"):
        reranking([[0.1], [bad]], [[1], [1]])


def test_a_query_without_a_relevant_document_is_refused(draw) -> None:
    with pytest.raises(DataError, match="query 1"):
        retrieval(draw(2, D), draw(3, D), [{0: 1.0}, {1: 0.0}])
    with pytest.raises(DataError, match="query 0"):
        reranking([[0.1, 0.2]], [[0, 0]])
    with pytest.raises(DataError, match="query 0"):
        reranking([[0.1, 0.2]], [[0, 0]], missed=[[0.0]])
    with pytest.raises(DataError, match="a label for each"):
        reranking([[0.1, 0.2]], [[1]])


def test_the_mean_of_a_slice(draw) -> None:
    values = {"mrr@1": np.array([0.0, 1.0, 0.5])}
    assert mean(values) == {"mrr@1": 0.5}
    assert mean(values, [1, 2]) == {"mrr@1": 0.75}


@pytest.mark.parametrize("elements", [1, 2**20])
def test_nearest(draw, elements: int) -> None:
    queries, documents = draw(Q, D), draw(M, D, seed=1)
    scores, places = nearest(queries, documents, 4, "dot", elements)
    order = (queries @ documents.T).argsort(dim=1, descending=True)[:, :4]
    assert torch.equal(places, order)
    torch.testing.assert_close(scores, (queries @ documents.T).gather(1, order).float())
    assert nearest(queries, documents[:2], 4)[1].shape == (Q, 2)
