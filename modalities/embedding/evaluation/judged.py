"""Evaluation of rerankers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....common.errors import DataError
from .families import correlated, reranked
from .names import Of


@dataclass(frozen=True)
class Judged:
    """An example with what a reranker makes of its documents.

    Args:
        scores: [L, C] logits of each document.
        labels: of each document.
        shape: what the labels are.
        source: data set.
        fields: what it may be sliced by.
        texts: tokens of query and document together, of each document.
        where: place of the row.
    """

    scores: np.ndarray
    labels: tuple[float, ...]
    shape: str
    source: int
    fields: Mapping[str, Any]
    texts: tuple[np.ndarray, ...]
    where: str = ""


def judged(data: dict[str, Any], logits: np.ndarray) -> list[Judged]:
    """The examples of a batch with the logits [M, C] of its documents."""
    lengths = data["attention_mask"].sum(dim=1).tolist()
    ids = data["input_ids"].int().cpu().numpy()
    documents, labels = data["documents"].tolist(), data["labels"].tolist()
    own: dict[int, list[int]] = defaultdict(list)
    for at, query in enumerate(data["owner"].tolist()):
        own[query].append(at)
    return [
        Judged(
            logits[own[row]],
            tuple(labels[at] for at in own[row]),
            data["shape"],
            data["source"],
            data["fields"][row],
            tuple(ids[documents[at]][: lengths[documents[at]]] for at in own[row]),
            data["where"][row],
        )
        for row in range(len(data["queries"]))
    ]


def families(records: Sequence[Judged], section: Any) -> list[tuple[Sequence[Any], Of]]:
    """Rows of an evaluation set and what measures them, of each metric that is asked for.

    Args:
        records: of the whole set; rows of the same query each with one document are one list.
        section: the recipe's evaluation.
    """
    found = []
    for name in section.metrics:
        if name not in FAMILIES:
            raise DataError(
                "a reranker does not have this metric",
                where="evaluate.metrics",
                given=name,
                expected=", ".join(FAMILIES),
            )
        found.append(FAMILIES[name](records, section))
    return found


def _reranking(records: Sequence[Judged], section: Any) -> tuple[Sequence[Any], Of]:
    rows = [one for one in records if one.shape == "groups"]
    return reranked(rows, [one.scores[:, 0].tolist() for one in rows], section)


def _similarity(records: Sequence[Judged], section: Any) -> tuple[Sequence[Any], Of]:
    rows = [one for one in records if one.shape == "scored"]
    return correlated(rows, [float(one.scores[0, 0]) for one in rows])


def _classification(records: Sequence[Judged], section: Any) -> tuple[Sequence[Any], Of]:
    rows = [one for one in records if one.shape == "classes"]
    if not rows:
        raise DataError("no rows with a class", where="evaluate.metrics", given="classification", expected="such rows")
    wanted = np.array([one.labels[0] for one in rows])
    found = np.array([one.scores[0].argmax() for one in rows])

    def of(chosen: Sequence[int]) -> dict[str, float]:
        from sklearn.metrics import f1_score  # type: ignore[import-untyped]

        places = list(chosen)
        return {
            "classification_accuracy": float((wanted[places] == found[places]).mean()),
            "classification_f1": float(f1_score(wanted[places], found[places], average="macro")),
        }

    return rows, of


FAMILIES = {"reranking": _reranking, "similarity": _similarity, "classification": _classification}


def samples(task: Any, records: Sequence[Judged], number: int) -> list[dict[str, Any]]:
    """A few pairs with their scores and labels."""
    found = []
    for one in list(records)[:number]:
        best = int(one.scores[:, 0].argmax())
        text = task.processing.tokenizer.read(one.texts[best])
        found.append(
            {"first of": len(one.labels), "score": float(one.scores[best, 0]), "label": one.labels[best], "text": text}
        )
    return found
