"""What embeddings know without further training of the model: a linear probe of classes, and clusters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from torch import Tensor

from ....common.errors import DataError, missing_extra
from .retrieval import finite


def classification(
    embeddings: Tensor, labels: Sequence[Hashable], test: float = 0.5, seed: int = 0, max_iter: int = 1000
) -> dict[str, float]:
    """Logistic regression from one part of the rows to the other, as in MTEB.

    Args:
        embeddings: [N, D]
        labels: [N] class of each row; every class at least twice.
        test: share of the rows that is predicted; both parts have the classes in the same proportions.
        seed: which rows.
        max_iter: of the optimizer.

    Returns:
        `accuracy` and `f1`, the mean over the classes, of the predicted part.
    """
    try:
        from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
        from sklearn.metrics import accuracy_score, f1_score  # type: ignore[import-untyped]
        from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
    except ImportError:
        raise missing_extra("scikit-learn", "embedding") from None
    rows, classes = _rows(embeddings), _classes(labels)
    few = np.bincount(classes).min()
    if few < 2:
        raise DataError("a probe needs every class at least twice", given=f"a class with {few} row")
    parts = train_test_split(rows, classes, test_size=test, random_state=seed, stratify=classes)
    model = LogisticRegression(max_iter=max_iter, random_state=seed).fit(parts[0], parts[2])
    found = model.predict(parts[1])
    return {
        "accuracy": float(accuracy_score(parts[3], found)),
        "f1": float(f1_score(parts[3], found, average="macro")),
    }


def clustering(embeddings: Tensor, labels: Sequence[Hashable], seed: int = 0, starts: int = 10) -> dict[str, float]:
    """How well k-means, with k the number of classes, finds them: `v_measure` (Rosenberg & Hirschberg, EMNLP 2007).

    Args:
        embeddings: [N, D]
        labels: [N] class of each row.
        seed: of the first centres.
        starts: k-means runs, of which the best by its own measure is kept.
    """
    try:
        from sklearn.cluster import KMeans  # type: ignore[import-untyped]
        from sklearn.metrics import v_measure_score
    except ImportError:
        raise missing_extra("scikit-learn", "embedding") from None
    rows, classes = _rows(embeddings), _classes(labels)
    found = KMeans(int(classes.max()) + 1, n_init=starts, random_state=seed).fit_predict(rows)
    return {"v_measure": float(v_measure_score(classes, found))}


def _rows(embeddings: Tensor) -> np.ndarray:
    finite(embeddings, "texts")
    rows: np.ndarray = embeddings.detach().float().cpu().numpy()
    return rows


def _classes(labels: Sequence[Hashable]) -> np.ndarray:
    """Numbers of the classes in the order of their names."""
    names = {name: number for number, name in enumerate(sorted(set(labels), key=str))}
    if len(names) < 2:
        raise DataError("a probe needs at least two classes", given=f"{len(names)} among {len(labels)} rows")
    return np.array([names[label] for label in labels])
