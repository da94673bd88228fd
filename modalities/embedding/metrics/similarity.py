"""Metrics of pairs and triplets of texts: semantic similarity, triplet accuracy, pair classification.

Each by four similarities; Euclidean and Manhattan are negative distances, so that more is always more similar.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ....common.errors import DataError
from .retrieval import finite

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


def pair_similarities(left: Tensor, right: Tensor) -> dict[str, np.ndarray]:
    """Similarities [N] of left [N, D] and right [N, D], row by row, by name, in float64.

    Raises:
        ModelError: an embedding is NaN or infinite.
    """
    finite(left, "first texts")
    finite(right, "second texts")
    left, right = left.detach().cpu().double(), right.detach().cpu().double()
    normal_left, normal_right = functional.normalize(left, dim=-1), functional.normalize(right, dim=-1)
    found = {
        "cosine": (normal_left * normal_right).sum(dim=-1),
        "dot": (left * right).sum(dim=-1),
        "euclidean": -torch.linalg.vector_norm(left - right, dim=-1),
        "manhattan": -torch.linalg.vector_norm(left - right, ord=1, dim=-1),
    }
    return {name: values.numpy() for name, values in found.items()}


def sts(left: Tensor, right: Tensor, labels: Sequence[float]) -> dict[str, float]:
    """Correlation of similarities with what people said: `pearson_cosine`, `spearman_cosine` and so on.

    Args:
        left: [N, D]
        right: [N, D]
        labels: [N] more is more similar.

    Returns:
        Values in [-1, 1]; 0 if all similarities are the same, as those of a collapsed model are.

    Raises:
        DataError: all labels are the same, so that nothing can correlate with them.
    """
    return {
        f"{metric}_{name}": value
        for name, values in pair_similarities(left, right).items()
        for metric, value in correlations(values.tolist(), labels).items()
    }


def correlations(scores: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """`pearson` and `spearman` of scores [N] and labels [N]; 0 if all scores are the same.

    Raises:
        DataError: all labels are the same, so that nothing can correlate with them.
    """
    values, wanted = np.asarray(scores, dtype=float), np.asarray(labels, dtype=float)
    if len(wanted) < 2 or (wanted == wanted[0]).all():
        raise DataError("a correlation needs different scores", given=f"{len(wanted)} pairs, all with the same score")
    return {"pearson": _correlation(values, wanted), "spearman": _correlation(_ranks(values), _ranks(wanted))}


def triplet_accuracy(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 0.0) -> dict[str, np.ndarray]:
    """Whether the positive is more similar than the negative by more than a margin: `accuracy_cosine` and so on.

    Equal ones count one half, what a coin would get, as in `retrieval`.

    Args:
        anchor: [N, D]
        positive: [N, D]
        negative: [N, D]
        margin: in units of the similarity.

    Returns:
        [N] 1, 0 or 0.5 of each triplet.
    """
    near, far = pair_similarities(anchor, positive), pair_similarities(anchor, negative)
    return {
        f"accuracy_{name}": 0.5 * ((near[name] > far[name] + margin) + (near[name] >= far[name] + margin) * 1.0)
        for name in SIMILARITIES
    }


def pair_classification(left: Tensor, right: Tensor, labels: Sequence[int]) -> dict[str, float]:
    """How well a threshold of the similarity tells pairs of label 1 from those of label 0.

    `accuracy`, `f1` (with `precision` and `recall`) at the best threshold for each, and the average precision `ap` over
    all thresholds, of each similarity: `ap_cosine` and so on. Pairs of the same similarity are always on the same side,
    so ties need no order; of thresholds that do equally well the highest is taken. A pair is called similar if its
    similarity is at least the threshold (for distances, their negative).

    Args:
        left: [N, D]
        right: [N, D]
        labels: [N] 1 or 0, both present.
    """
    wanted = np.asarray(labels)
    if not np.isin(wanted, (0, 1)).all() or len(np.unique(wanted)) < 2:
        raise DataError(
            "pair classification needs labels 0 and 1", given=np.unique(wanted)[:10].tolist(), expected="both"
        )
    metrics = {}
    for name, values in pair_similarities(left, right).items():
        metrics.update({f"{metric}_{name}": value for metric, value in thresholds(values, wanted).items()})
    return metrics


def thresholds(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The metrics of `pair_classification` of scores [N] and labels [N] of 0 and 1."""
    order = np.argsort(-scores, kind="stable")
    scores, labels = scores[order], labels[order]
    last = np.append(np.nonzero(np.diff(scores))[0], len(scores) - 1)  # of each group of equal scores
    bound = scores[last].astype(float)
    bound[:-1] = _between(bound[:-1], scores[last[:-1] + 1])
    right, called, positives = np.cumsum(labels)[last], last + 1, labels.sum()
    precision, recall = right / called, right / positives
    f1 = 2 * right / (called + positives)
    accuracy = (2 * right + len(labels) - positives - called) / len(labels)
    accuracy = np.append((len(labels) - positives) / len(labels), accuracy)  # first: none is called similar
    bounds = np.append(np.nextafter(scores[0], np.inf), bound)
    best, top = int(np.argmax(f1)), int(np.argmax(accuracy))
    return {
        "accuracy": float(accuracy[top]),
        "accuracy_threshold": float(bounds[top]),
        "f1": float(f1[best]),
        "f1_threshold": float(bound[best]),
        "precision": float(precision[best]),
        "recall": float(recall[best]),
        "ap": float((np.diff(recall, prepend=0.0) * precision).sum()),
    }


def _between(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    middle = (high + low) / 2
    return np.where(middle == low, high, middle)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value; equal ones have the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    if (left == left[0]).all():
        return 0.0
    left, right = left - left.mean(), right - right.mean()
    return float((left @ right) / np.sqrt((left @ left) * (right @ right)))
