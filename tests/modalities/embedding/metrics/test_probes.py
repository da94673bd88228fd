from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import v_measure_score
from torch import Tensor

from luthier.common.errors import DataError
from luthier.modalities.embedding.metrics import probes

LABELS = ["cat", "dog", "owl"] * 20


def grouped(draw, apart: float) -> Tensor:
    """Rows around three corners, so far from each other."""
    corners = torch.eye(3, 8, dtype=torch.float64)[[0, 1, 2] * 20]
    return draw(60, 8) + apart * corners


def test_classes_that_are_far_apart_are_found(draw) -> None:
    rows = grouped(draw, 50.0)
    assert probes.classification(rows, LABELS) == {"accuracy": 1.0, "f1": 1.0}
    assert probes.clustering(rows, LABELS) == {"v_measure": pytest.approx(1.0)}


def test_embeddings_without_the_classes_give_chance(draw) -> None:
    """30 rows in three classes: 1/3, within three standard deviations of sqrt(2/9/30) = 0.086."""
    assert abs(probes.classification(draw(60, 8), LABELS)["accuracy"] - 1 / 3) < 3 * 0.086
    assert probes.clustering(draw(60, 8), LABELS)["v_measure"] < 0.2


def test_a_probe_is_a_logistic_regression_on_rows_it_was_not_fitted_to(draw) -> None:
    """The part that is predicted is drawn by the seed, with the same share of each class."""
    rows = grouped(draw, 1.5)
    found = [probes.classification(rows, LABELS, seed=seed)["accuracy"] for seed in (0, 0, 1, 2)]
    assert found[0] == found[1]
    assert len(set(found)) > 1
    fitted = LogisticRegression(max_iter=1000).fit(rows.numpy(), LABELS)
    assert fitted.score(rows.numpy(), LABELS) > max(found)


def test_clusters_are_those_of_k_means(draw) -> None:
    rows = grouped(draw, 2.0)
    wanted = v_measure_score(LABELS, KMeans(3, n_init=10, random_state=5).fit_predict(rows.float().numpy()))
    assert 0.05 < wanted < 0.95
    assert probes.clustering(rows, LABELS, seed=5)["v_measure"] == pytest.approx(wanted)


def test_too_few_rows_or_classes(draw) -> None:
    with pytest.raises(DataError, match="twice"):
        probes.classification(draw(3, 3), ["a", "a", "b"])
    with pytest.raises(DataError, match="two classes"):
        probes.clustering(draw(4, 3), ["a"] * 4)
    assert np.isfinite(probes.classification(draw(4, 3), [1, 1, 2, 2])["f1"])
