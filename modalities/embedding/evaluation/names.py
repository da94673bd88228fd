"""Names of metrics, and metrics by slice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from ....common.evaluation.each import Each
from ..config import EmbeddingEvaluate, Metric
from . import benchmarks

RANKED = ("ndcg", "mrr", "recall", "map")
"""Metrics of rankings that are shown."""


def _own(section: Any) -> int:
    return 10 if 10 in section.at else max(section.at)


def metrics_of(section: Any) -> dict[str, str]:
    """Names of the metrics that an evaluation section asks for; the first decides which checkpoint is best."""
    first = {
        "retrieval": [f"ndcg@{_own(section)}", *(f"{name}@{k}" for k in section.at for name in RANKED)],
        "reranking": [f"rerank_ndcg@{_own(section)}", *(f"rerank_{name}@{k}" for k in section.at for name in RANKED)],
        "similarity": ["spearman", "pearson"],
        "triplet": ["triplet_accuracy"],
        "classification": ["classification_accuracy", "classification_f1"],
        "clustering": ["v_measure"],
    }
    names = [name for metric in section.metrics for name in first[metric]]
    return {**dict.fromkeys(names, "max"), **benchmarks.names(section.mteb), "loss": "min"}


METRICS = {**metrics_of(EmbeddingEvaluate(metrics=get_args(Metric)))}
"""All metrics, by their names at the default numbers of documents."""

Of = Callable[[Sequence[int]], dict[str, Any]]
"""Metrics of some of the rows."""


MEANS = ("retrieval", "reranking", "triplet")
"""Families whose metrics are means over the rows."""


def each(
    names: Iterable[str],
    families: Iterable[tuple[Sequence[Any], Of]],
    slices: Sequence[str],
    labels: Sequence[str],
) -> list[Each]:
    """What each row adds to the metrics that are means; a family's rows stand after those of the one before.

    Args:
        names: of the families.
        families: as of `by_slice`.
        slices: fields.
        labels: name of each data set.
    """
    found = []
    for name, (rows, of) in zip(names, families, strict=True):
        if name not in MEANS:
            continue
        for at, row in enumerate(rows):
            parts = {metric: (float(value), 1.0) for metric, value in of([at]).items()}
            fields = {one: labels[row.source] if one == "source" else row.fields.get(one) for one in slices}
            found.append(Each(row.where, parts, fields))
    return found


def by_slice(
    families: Iterable[tuple[Sequence[Any], Of]], slices: Sequence[str], labels: Sequence[str]
) -> dict[str, Any]:
    """Metrics of all rows, and under `slices` those of each value of a field.

    Args:
        families: rows (with `fields` and `source`) and what measures them.
        slices: fields.
        labels: name of each data set.
    """
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for rows, of in families:
        found |= of(range(len(rows)))
        for field in slices:
            chosen: dict[str, list[int]] = defaultdict(list)
            for at, row in enumerate(rows):
                value = labels[row.source] if field == "source" else row.fields.get(field)
                if value is not None:
                    chosen[str(value)].append(at)
            if len(chosen) > 1:
                for value, places in sorted(chosen.items()):
                    parts[field][value] |= {**of(places), "examples": len(places)}
    found["slices"] = {field: dict(values) for field, values in parts.items()}
    return found
