"""Pairs and triplets against sentence-transformers' evaluators on the same embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer import evaluation
from sklearn.metrics import average_precision_score

from luthier.common.errors import DataError, ModelError
from luthier.modalities.embedding.metrics import similarity

N, D = 30, 5
NAMES = list(similarity.SIMILARITIES)
FIRST, SECOND, THIRD = ([str(at) for at in range(begin, begin + N)] for begin in (0, N, 2 * N))


def test_sts(draw, encoded) -> None:
    rows = draw(2 * N, D)
    rows[N:] += 2 * rows[:N]
    labels = (rows[:N].sum(dim=1) * 2).round().tolist()
    judge = evaluation.EmbeddingSimilarityEvaluator(FIRST, SECOND, labels, similarity_fn_names=NAMES, write_csv=False)
    wanted = judge(encoded(rows))
    found = similarity.sts(rows[:N], rows[N:], labels)
    assert len(found) == 8
    assert len(set(labels)) < N
    for name, value in found.items():
        assert value == pytest.approx(float(wanted[name]), abs=1e-9), name


def test_a_collapsed_model_correlates_with_nothing(draw) -> None:
    same = draw(1, D).expand(N, D)
    assert set(similarity.sts(same, same, list(range(N))).values()) == {0.0}
    with pytest.raises(DataError, match="different scores"):
        similarity.sts(draw(N, D), draw(N, D, seed=1), [1.0] * N)


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_triplet_accuracy(draw, encoded, margin: float) -> None:
    rows = draw(3 * N, D)
    rows[N : 2 * N] += 0.5 * rows[:N]
    judge = evaluation.TripletEvaluator(FIRST, SECOND, THIRD, margin=margin, similarity_fn_names=NAMES, write_csv=False)
    wanted = judge(encoded(rows))
    found = similarity.triplet_accuracy(rows[:N], rows[N : 2 * N], rows[2 * N :], margin)
    for name in NAMES:
        assert 0 < found[f"accuracy_{name}"].mean() < 1
        assert found[f"accuracy_{name}"].mean() == pytest.approx(float(wanted[f"{name}_accuracy"]), abs=1e-6)


def test_a_tie_is_what_a_coin_would_get(draw) -> None:
    rows = draw(4, D)
    found = similarity.triplet_accuracy(rows, rows.flip(0), rows.flip(0))
    assert {tuple(values) for values in found.values()} == {(0.5,) * 4}


def test_pair_classification(draw, encoded) -> None:
    """With these values no two thresholds have the same F1 or accuracy, of which either could be taken."""
    rows, labels = draw(2 * N, D, seed=1), [at % 3 == 0 for at in range(N)]
    rows[N:][torch.tensor(labels)] += rows[:N][torch.tensor(labels)]
    judge = evaluation.BinaryClassificationEvaluator(
        FIRST, SECOND, [int(label) for label in labels], similarity_fn_names=NAMES, write_csv=False
    )
    wanted = judge(encoded(rows))
    found = similarity.pair_classification(rows[:N], rows[N:], [int(label) for label in labels])
    for name in NAMES:
        sign = -1 if name in ("euclidean", "manhattan") else 1
        for metric in ("accuracy", "f1", "precision", "recall", "ap"):
            assert found[f"{metric}_{name}"] == pytest.approx(float(wanted[f"{name}_{metric}"]), abs=1e-9)
        for metric in ("accuracy_threshold", "f1_threshold"):
            assert sign * found[f"{metric}_{name}"] == pytest.approx(float(wanted[f"{name}_{metric}"]), abs=1e-6)


def test_tied_pairs_are_on_the_same_side() -> None:
    """Three of four pairs tie: the thresholds are above all, above the three and below them; order says nothing."""
    scores, labels = np.array([0.5, 0.9, 0.5, 0.5]), np.array([1, 0, 1, 0])
    found = similarity.thresholds(scores, labels)
    assert found == similarity.thresholds(scores[::-1], labels[::-1])
    assert found["ap"] == pytest.approx(average_precision_score(labels, scores)) == pytest.approx(0.5)
    assert (found["accuracy"], found["accuracy_threshold"]) == (0.5, np.nextafter(0.9, np.inf))
    assert (found["f1"], found["f1_threshold"], found["recall"]) == (pytest.approx(2 / 3), 0.5, 1.0)


def test_labels_and_embeddings_that_can_not_be_used(draw) -> None:
    rows = draw(4, D)
    with pytest.raises(DataError, match="0 and 1"):
        similarity.pair_classification(rows, rows, [1, 1, 1, 1])
    with pytest.raises(DataError, match="0 and 1"):
        similarity.pair_classification(rows, rows, [0, 1, 2, 1])
    rows[1, 0] = torch.nan
    with pytest.raises(ModelError, match=r"first texts, row 1"):
        similarity.sts(rows, draw(4, D), [1, 2, 3, 4])
