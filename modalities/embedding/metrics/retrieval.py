"""Ranking metrics of each query: nDCG, MRR, recall, precision, MAP and accuracy at k.

One rule for ties: where documents have the same score, a metric is its mean over all orders of them (McSherry & Najork,
ECIR 2008). So it depends neither on the order of the documents nor on a sort, a collapsed model scores what chance
scores, and a metric without ties is what it always was. Inner products are summed in float64 and rounded to float32, so
that equal embeddings tie.

Gains of nDCG are the grades themselves, as in trec_eval, BEIR and MTEB; the discount of place p is log2(1 + p).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ....common.errors import DataError, ModelError

Kind = Literal["cosine", "dot"]
Values = dict[str, np.ndarray]
"""`ndcg@10` and others -> [Q] value of each query."""

KS = (1, 3, 5, 10, 100)
ELEMENTS = 2**23
"""Scores that are in memory at a time, with about 30 bytes of work for each; those of one query always are."""
_COLUMNS = 2**14


def retrieval(
    queries: Tensor,
    documents: Tensor,
    relevant: Sequence[Mapping[int, float]],
    ks: Sequence[int] = KS,
    kind: Kind = "cosine",
    elements: int = ELEMENTS,
) -> Values:
    """Metrics of a search among all documents.

    Args:
        queries: [Q, D]
        documents: [M, D]
        relevant: of each query, index of a document -> grade; those with a grade above 0 are relevant.
        ks: cutoffs.
        kind: cosine or inner product.
        elements: bound of the scores in memory.

    Returns:
        `ndcg@k`, `mrr@k`, `recall@k`, `precision@k`, `map@k`, `accuracy@k` -> [Q] values in [0, 1].

    Raises:
        DataError: a query without a relevant document.
        ModelError: an embedding is NaN or infinite.
    """
    graded = [_graded(grades, f"query {row}") for row, grades in enumerate(relevant)]
    found: list[dict[str, float]] = []
    for begin, scores in _scores(queries, documents, kind, elements):
        part = graded[begin : begin + len(scores)]
        places = _places(scores, [list(grades) for grades in part])
        for (above, tied), grades in zip(places, part, strict=True):
            found.append(_metrics(_Ranked(above, tied, np.array(list(grades.values()), dtype=float)), ks))
    return _columns(found)


def reranking(
    scores: Sequence[Sequence[float]],
    labels: Sequence[Sequence[float]],
    ks: Sequence[int] = KS,
    missed: Sequence[Sequence[float]] | None = None,
) -> Values:
    """Metrics of lists of documents that have been scored.

    Args:
        scores: of each query's documents.
        labels: grades of the same documents; those above 0 are relevant.
        ks: cutoffs.
        missed: grades of each query's relevant documents that are not in its list: never found, but part of the ideal.

    Raises:
        DataError: a query without a relevant document, or lists of unequal length.
        ModelError: a score is NaN or infinite.
    """
    found = []
    for row, (given, grades) in enumerate(zip(scores, labels, strict=True)):
        values, marks = np.asarray(given, dtype=float), np.asarray(grades, dtype=float)
        if values.shape != marks.shape:
            raise DataError(
                "a list needs a label for each score", where=f"query {row}", given=(len(given), len(grades))
            )
        if not np.isfinite(values).all():
            raise ModelError("a score is not finite", where=f"query {row}", given=given)
        wanted = _graded({place: float(grade) for place, grade in enumerate(marks)}, f"query {row}", missed is None)
        own = values[list(wanted)][:, None]
        lost = [grade for grade in (missed[row] if missed is not None else ()) if grade > 0]
        if not wanted and not lost:
            raise _nothing_relevant(f"query {row}")
        above = np.concatenate([(values > own).sum(axis=1), np.full(len(lost), np.iinfo(np.int64).max)])
        tied = np.concatenate([(values == own).sum(axis=1), np.ones(len(lost), dtype=np.int64)])
        found.append(_metrics(_Ranked(above, tied, np.array([*wanted.values(), *lost], dtype=float)), ks))
    return _columns(found)


def mean(values: Values, rows: Sequence[int] | None = None) -> dict[str, float]:
    """Mean over the queries, or over those at `rows` (a slice)."""
    chosen = slice(None) if rows is None else np.asarray(rows, dtype=np.int64)
    return {name: float(np.mean(column[chosen])) for name, column in values.items()}


def nearest(
    queries: Tensor, documents: Tensor, k: int, kind: Kind = "cosine", elements: int = ELEMENTS
) -> tuple[Tensor, Tensor]:
    """The k documents that are most similar to each query, to be read, with their scores.

    Which of the documents that tie for the last place is among them is not defined.

    Returns:
        Scores [Q, k] float32 and indices [Q, k], on the CPU; fewer columns if there are fewer documents.
    """
    k = min(k, len(documents))
    parts = [scores.topk(k, dim=1) for _, scores in _scores(queries, documents, kind, elements)]
    if not parts:
        return torch.zeros(0, k), torch.zeros(0, k, dtype=torch.long)
    return torch.cat([part.values for part in parts]).cpu(), torch.cat([part.indices for part in parts]).cpu()


def finite(embeddings: Tensor, name: str) -> None:
    """Raise ModelError if a value is NaN or infinite, naming the first row that has one."""
    good = torch.isfinite(embeddings).all(dim=-1)
    if not bool(good.all()):
        rows = (~good).nonzero()[:, 0]
        raise ModelError(
            "an embedding is not finite",
            where=f"{name}, row {int(rows[0])}",
            given=f"NaN or infinity in {len(rows)} of {len(good)} embeddings",
            do="look for the step where the loss or the gradient became infinite; lower learning_rate",
        )


@dataclass(frozen=True)
class _Ranked:
    """The relevant documents of a query.

    Args:
        above: [R] documents that score higher than this one.
        tied: [R] documents that score the same, itself included.
        grades: [R]
    """

    above: np.ndarray
    tied: np.ndarray
    grades: np.ndarray


def _graded(grades: Mapping[int, float], where: str, needed: bool = True) -> dict[int, float]:
    kept = {index: grade for index, grade in grades.items() if grade > 0}
    if needed and not kept:
        raise _nothing_relevant(where)
    return kept


def _nothing_relevant(where: str) -> DataError:
    return DataError("a query has no relevant document", where=where, do="leave out the queries without one")


def _scores(queries: Tensor, documents: Tensor, kind: Kind, elements: int) -> Iterator[tuple[int, Tensor]]:
    """First row and scores [q, M] float32 of a few queries at a time."""
    if queries.device.type == "mps":  # which has no float64
        queries, documents = queries.cpu(), documents.cpu()
    finite(queries, "queries")
    finite(documents, "documents")
    for begin, part in _parts(queries, max(1, elements // max(len(documents), 1))):
        ask = _exact(part, kind)
        columns = [(ask @ _exact(block, kind).T).float() for _, block in _parts(documents, _COLUMNS)]
        yield begin, torch.cat(columns, dim=1)


def _parts(tensor: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, len(tensor), size):
        yield begin, tensor[begin : begin + size]


def _exact(embeddings: Tensor, kind: Kind) -> Tensor:
    embeddings = embeddings.detach().double()
    return functional.normalize(embeddings, dim=-1) if kind == "cosine" else embeddings


def _places(scores: Tensor, relevant: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(documents above, documents tied) of each relevant document of each query: counted, nothing is sorted.

    With the scores of a query's R relevant documents in ascending order as bounds, a document is above bound j if more
    than j bounds are lower than its score, and not below it if more than j bounds are not higher.
    """
    longest = max(len(indices) for indices in relevant)
    index = torch.tensor([indices + [-1] * (longest - len(indices)) for indices in relevant], device=scores.device)
    bounds = scores.gather(1, index.clamp(min=0)).masked_fill(index < 0, torch.inf)
    bounds, order = bounds.sort(dim=1)
    above = _more_than(torch.searchsorted(bounds, scores), longest)
    tied = _more_than(torch.searchsorted(bounds, scores, right=True), longest) - above
    above, tied = (torch.empty_like(part).scatter_(1, order, part).cpu() for part in (above, tied))
    return [
        (up[: len(indices)].numpy(), same[: len(indices)].numpy())
        for up, same, indices in zip(above, tied, relevant, strict=True)
    ]


def _more_than(counts: Tensor, longest: int) -> Tensor:
    """[q, M] numbers of bounds -> [q, R] how many of them are more than 0, 1, ..., R - 1."""
    histogram = torch.zeros(len(counts), longest + 1, dtype=torch.long, device=counts.device)
    histogram.scatter_add_(1, counts, torch.ones_like(counts[:1, :1]).expand_as(counts))
    return histogram.flip(1).cumsum(dim=1).flip(1)[:, 1:]


def _metrics(ranked: _Ranked, ks: Sequence[int]) -> dict[str, float]:
    """Expected metrics of one query over the orders of its ties.

    A group of n documents tied at places a + 1, ..., a + n, of which r are relevant, c relevant ones being above it,
    has at its place j: a relevant document with probability r / n; given that, c + 1 + (j - 1)(r - 1) / (n - 1)
    relevant ones up to there; none up to there, if c = 0, with probability prod over i < j of (n - r - i) / (n - i).
    """
    longest = max(ks)
    gain, hit, precision = np.zeros(longest), np.zeros(longest), np.zeros(longest)
    missed = np.ones(longest)  # probability of nothing relevant up to here
    places = np.arange(1, longest + 1)
    before = 0
    for start in np.unique(ranked.above):
        if start >= longest:
            break
        group = ranked.above == start
        size, right = int(ranked.tied[group][0]), int(group.sum())
        span = slice(start, min(start + size, longest))
        j = np.arange(len(places[span]))
        gain[span] = ranked.grades[group].sum() / size
        hit[span] = right / size
        precision[span] = right / size * (before + 1 + j * (right - 1) / max(size - 1, 1)) / places[span]
        if before == 0:
            missed[span] = np.cumprod(np.maximum(size - right - j, 0) / (size - j))
            missed[span.stop :] = 0.0
        before += right
    first = np.concatenate([[1.0], missed[:-1]]) - missed
    discount = 1 / np.log2(1 + places)
    ideal = np.zeros(longest)
    best = np.sort(ranked.grades)[::-1][:longest]
    ideal[: len(best)] = best
    total = len(ranked.grades)
    curves = {
        "ndcg": np.cumsum(gain * discount) / np.cumsum(ideal * discount),
        "mrr": np.cumsum(first / places),
        "recall": np.cumsum(hit) / total,
        "precision": np.cumsum(hit) / places,
        "map": np.cumsum(precision) / np.minimum(places, total),
        "accuracy": 1 - missed,
    }
    return {f"{name}@{k}": float(curve[k - 1]) for name, curve in curves.items() for k in ks}


def _columns(rows: list[dict[str, float]]) -> Values:
    return {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}
