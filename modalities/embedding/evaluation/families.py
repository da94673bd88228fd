"""The metrics of models that embed queries and documents apart, one family for each word of `evaluate.metrics`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ....common.errors import DataError
from ....common.evaluation.run import spread
from ..metrics import probes, quantized, retrieval, similarity
from .encoded import Encoded, stacked
from .names import RANKED, Of

if TYPE_CHECKING:
    from ..retriever import RetrieverTask


def families(task: RetrieverTask, records: Sequence[Encoded]) -> list[tuple[Sequence[Any], Of]]:
    """Rows of an evaluation set and what measures them, of each metric that is asked for."""
    return [FAMILIES[name](task, records) for name in task.recipe.evaluate.metrics]


# ---------------------------------------------------------------------- retrieval


@dataclass(frozen=True)
class Search:
    """Queries, the documents of the whole set, and which are relevant: a text is in it once.

    Args:
        rows: an example of each query.
        documents: vector and tokens of each document.
        relevant: of each query, index of a document -> grade.
    """

    rows: list[Encoded]
    documents: list[tuple[np.ndarray, np.ndarray]]
    relevant: list[dict[int, float]]

    @classmethod
    def of(cls, records: Sequence[Encoded]) -> Search:
        places: dict[int, int] = {}
        documents: list[tuple[np.ndarray, np.ndarray]] = []
        queries: dict[int, Encoded] = {}
        relevant: dict[int, dict[int, float]] = defaultdict(dict)
        for one in records:
            if one.shape != "groups":
                continue
            texts = one.texts if one.query is None else one.texts[1:]
            for key, vector, label, text in zip(one.document_keys, one.documents, one.labels, texts, strict=True):
                if key not in places:
                    places[key] = len(documents)
                    documents.append((vector, text))
                if one.query is not None and label > 0:
                    queries.setdefault(one.query_key, one)
                    own = relevant[one.query_key]
                    own[places[key]] = max(label, own.get(places[key], 0.0))
        if not queries:
            raise DataError(
                "no query with a relevant document", where="evaluate.metrics", given="retrieval", expected="such rows"
            )
        return cls(list(queries.values()), documents, [relevant[key] for key in queries])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Queries and documents, [Q, ...] and [M, ...]."""
        return stacked([row.query for row in self.rows]), stacked([vector for vector, _ in self.documents])


def _retrieval(task: RetrieverTask, records: Sequence[Encoded]) -> tuple[Sequence[Any], Of]:
    search, section = Search.of(records), task.recipe.evaluate
    queries, documents = search.tensors()
    if task.similarity is None:
        values = _compared(task, search, queries, documents)
    else:
        values = retrieval.retrieval(queries, documents, search.relevant, section.at, task.similarity)
    values = _kept(values, section)
    for row in _smaller(task, search, queries, documents):
        values |= {f"{name} {row.name}": column for name, column in _kept(row.values, section).items()}
    return search.rows, lambda rows: retrieval.mean(values, rows)


def _kept(values: retrieval.Values, section: Any) -> retrieval.Values:
    return {f"{name}@{k}": values[f"{name}@{k}"] for k in section.at for name in RANKED}


def _compared(task: RetrieverTask, search: Search, queries: Tensor, documents: Tensor) -> retrieval.Values:
    """Retrieval by a similarity that is no product of two vectors."""
    scores = [task.compare(query[None], documents)[0].tolist() for query in queries]
    labels = [[own.get(at, 0.0) for at in range(len(documents))] for own in search.relevant]
    return retrieval.reranking(scores, labels, task.recipe.evaluate.at)


def _smaller(task: RetrieverTask, search: Search, queries: Tensor, documents: Tensor) -> list[quantized.Row]:
    """The same with fewer dimensions and bits, as the recipe asks for."""
    section = task.recipe.evaluate
    if task.similarity is None or not (section.dimensions or section.quantized):
        return []
    whole = queries.shape[1]
    formats: tuple[quantized.Precision, ...] = ("float32", *section.quantized)
    sizes = (whole, *(size for size in section.dimensions if size != whole))
    found = quantized.table(queries, documents, search.relevant, sizes, formats, section.at, task.similarity)
    return [row for row in found if (row.dimensions, row.precision) != (whole, "float32")]


# ---------------------------------------------------------------------- the others


def _reranking(task: RetrieverTask, records: Sequence[Encoded]) -> tuple[Sequence[Any], Of]:
    rows = [one for one in records if one.shape == "groups" and one.query is not None]
    scores = [task.compare(stacked([one.query]), stacked(one.documents))[0].tolist() for one in rows]
    return reranked(rows, scores, task.recipe.evaluate)


def reranked(rows: Sequence[Any], scores: Sequence[Sequence[float]], section: Any) -> tuple[Sequence[Any], Of]:
    """Metrics of each query's own documents; those of queries whose documents are all alike are left out."""
    kept = [at for at, row in enumerate(rows) if min(row.labels) <= 0 < max(row.labels)]
    if not kept:
        raise DataError(
            "no query with relevant and other documents",
            where="evaluate.metrics",
            given="reranking",
            expected="such rows",
        )
    found = retrieval.reranking([scores[at] for at in kept], [rows[at].labels for at in kept], section.at)
    values = {f"rerank_{name}": column for name, column in _kept(found, section).items()}
    return [rows[at] for at in kept], lambda chosen: retrieval.mean(values, chosen)


def _similarity(task: RetrieverTask, records: Sequence[Encoded]) -> tuple[Sequence[Any], Of]:
    rows = [one for one in records if one.shape == "scored"]
    scores = [float(task.compare(stacked([one.query]), stacked(one.documents))[0, 0]) for one in rows]
    return correlated(rows, scores)


def correlated(rows: Sequence[Any], scores: Sequence[float]) -> tuple[Sequence[Any], Of]:
    """Correlation of scores with the rows' own."""
    if not rows:
        raise DataError("no rows with a score", where="evaluate.metrics", given="similarity", expected="such rows")
    wanted = [row.labels[0] for row in rows]

    def of(chosen: Sequence[int]) -> dict[str, float]:
        return similarity.correlations([scores[at] for at in chosen], [wanted[at] for at in chosen])

    return rows, of


def _triplet(task: RetrieverTask, records: Sequence[Encoded]) -> tuple[Sequence[Any], Of]:
    rows, right = [], []
    for one in records:
        if one.shape != "groups" or one.query is None or not min(one.labels) <= 0 < max(one.labels):
            continue
        scores = task.compare(stacked([one.query]), stacked(one.documents))[0].tolist()
        near = scores[one.labels.index(max(one.labels))]
        for far in (score for score, label in zip(scores, one.labels, strict=True) if label <= 0):
            rows.append(one)
            right.append(1.0 if near > far else 0.5 if near == far else 0.0)
    if not rows:
        raise DataError("no triplets", where="evaluate.metrics", given="triplet", expected="rows with negatives")
    return rows, lambda chosen: {"triplet_accuracy": float(np.mean([right[at] for at in chosen]))}


def _probed(task: RetrieverTask, records: Sequence[Encoded], name: str) -> tuple[list[Encoded], Tensor, list[int]]:
    rows = [one for one in records if one.shape == "labelled"]
    if not rows:
        raise DataError("no rows of text and label", where="evaluate.metrics", given=name, expected="such rows")
    if task.similarity is None:
        raise DataError(
            "a text has more than one vector", where="evaluate.metrics", given=name, expected="other metrics"
        )
    return rows, stacked([one.query for one in rows]), [one.label for one in rows]


def _classification(task: RetrieverTask, records: Sequence[Encoded]) -> tuple[Sequence[Any], Of]:
    rows, vectors, labels = _probed(task, records, "classification")

    def of(chosen: Sequence[int]) -> dict[str, float]:
        found = probes.classification(vectors[list(chosen)], [labels[at] for at in chosen])
        return {f"classification_{name}": value for name, value in found.items()}

    return rows, of


def _clustering(task: RetrieverTask, records: Sequence[Encoded]) -> tuple[Sequence[Any], Of]:
    rows, vectors, labels = _probed(task, records, "clustering")
    return rows, lambda chosen: probes.clustering(vectors[list(chosen)], [labels[at] for at in chosen])


FAMILIES: dict[str, Callable[[RetrieverTask, Sequence[Encoded]], tuple[Sequence[Any], Of]]] = {
    "retrieval": _retrieval,
    "reranking": _reranking,
    "similarity": _similarity,
    "triplet": _triplet,
    "classification": _classification,
    "clustering": _clustering,
}


def samples(task: RetrieverTask, records: Sequence[Encoded], number: int) -> list[dict[str, Any]]:
    """A few queries with what was found for each."""
    if not number or "retrieval" not in task.recipe.evaluate.metrics:
        return []
    search, read = Search.of(records), task.processing.tokenizer.read
    chosen = spread(len(search.rows), number)
    _, documents = search.tensors()
    found = []
    for at in chosen:
        row = search.rows[at]
        scores = task.compare(stacked([row.query]), documents)[0]
        best = scores.topk(min(3, len(documents)))
        places = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        told = [
            f"{value:.3f} {'+' if j in search.relevant[at] else '-'} {read(search.documents[j][1].tolist())}"
            for value, j in places
        ]
        found.append({"query": read(row.texts[0].tolist()), **{f"found {n}": text for n, text in enumerate(told, 1)}})
    return found
