"""Codes against sentence-transformers.quantization; metrics against the same search on what the codes stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers.util.quantization import quantize_embeddings
from torch import Tensor
from torch.nn import functional

from luthier.modalities.embedding.metrics.quantized import int8, table
from luthier.modalities.embedding.metrics.retrieval import retrieval

Q, M, D = 10, 60, 16
RELEVANT = [{at: 1.0, at + 20: 2.0} for at in range(Q)]


def embedded(draw) -> tuple[Tensor, Tensor]:
    """Queries near their documents."""
    documents = draw(M, D).float()
    return documents[:Q] + 0.8 * draw(Q, D, seed=1).float(), documents


def test_int8_codes_are_theirs(draw) -> None:
    queries, documents = embedded(draw)
    ranges = torch.stack([documents.amin(dim=0), documents.amax(dim=0)])
    for part in (queries, documents):
        wanted = quantize_embeddings(part.numpy(), "int8", calibration_embeddings=documents.numpy())
        assert np.array_equal(int8(part, ranges).numpy(), wanted)


def test_rows_and_sizes(draw) -> None:
    rows = table(*embedded(draw), RELEVANT, [16, 12], ks=[5])
    assert [(row.name, row.size) for row in rows] == [
        ("16/float32", 64), ("16/int8", 16), ("16/binary", 2),
        ("12/float32", 48), ("12/int8", 12), ("12/binary", 2),
    ]  # fmt: skip
    assert all(len(row.values["ndcg@5"]) == Q for row in rows)


@pytest.mark.parametrize("size", [16, 8])
def test_float32_is_the_search_with_cut_embeddings(draw, size: int) -> None:
    queries, documents = embedded(draw)
    (row,) = table(queries, documents, RELEVANT, [size], ["float32"], [5])
    wanted = retrieval(queries[:, :size], documents[:, :size], RELEVANT, [5])
    assert row.values["ndcg@5"].tolist() == pytest.approx(wanted["ndcg@5"].tolist(), abs=1e-9)


def test_binary_is_the_search_by_hamming_distance(draw) -> None:
    """Their packed bits, their distance; as integers, so that it ties, which the metrics take the mean of."""
    queries, documents = (functional.normalize(part, dim=-1) for part in embedded(draw))
    ask, tell = (quantize_embeddings(part.numpy(), "ubinary") for part in (queries, documents))
    distances = np.unpackbits(ask[:, None] ^ tell[None], axis=-1).sum(axis=-1)
    assert len(np.unique(distances)) < 17
    (row,) = table(queries, documents, RELEVANT, [D], ["binary"], [5])
    for at in range(Q):
        labels = [RELEVANT[at].get(place, 0.0) for place in range(M)]
        order = np.random.default_rng(at).permutation(M)
        assert row.values["recall@5"][at] == pytest.approx(
            expected_recall(distances[at][order], np.array(labels)[order])
        )


def expected_recall(distances: np.ndarray, labels: np.ndarray, k: int = 5) -> float:
    """Each relevant document's chance to be among the first k, its ties in any order."""
    own = distances[labels > 0]
    nearer = (distances[None] < own[:, None]).sum(axis=1)
    tied = (distances[None] == own[:, None]).sum(axis=1)
    return float((np.clip(k - nearer, 0, tied) / tied).mean())


def test_eight_bits_cost_little_and_one_bit_more(draw) -> None:
    full, eight, one = table(*embedded(draw), RELEVANT, [D], ks=[10])
    means = [row.values["ndcg@10"].mean() for row in (full, eight, one)]
    assert abs(means[0] - means[1]) < 0.02
    assert means[2] < means[0] - 0.02
