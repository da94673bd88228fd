"""What can be wrong with the training data of an embedding model or reranker, though no row alone is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...common.errors import DataError, LuthierError
from .example import Example

MOST = 0.5
"""Share of the examples above which what is found is no exception."""


def found(examples: Sequence[Example]) -> Iterator[LuthierError]:
    """Negatives that are positives, queries that are their own documents, labels that are all the same."""
    groups = [one for one in examples if one.shape == "groups"]
    if false := [one for one in groups if _contradicts(one)]:
        yield DataError(
            "a negative is a document that belongs to the query",
            where="data.train",
            given=f"{len(false)} of {len(groups)} rows, such as {false[0].where}",
            do="take these negatives out; `luthier mine` leaves known positives out",
        )
    same = [one for one in groups if one.query is not None and one.query.key in _belonging(one)]
    if len(same) > MOST * len(groups):
        yield DataError(
            "queries are their own documents, which teaches nothing",
            where="data.train",
            given=f"{len(same)} of {len(groups)} rows, such as {same[0].where}",
            do="see data's `roles`: which column is the query, and which the document",
        )
    for shape, name in (("scored", "score"), ("classes", "label"), ("labelled", "label")):
        labels = [one.labels for one in examples if one.shape == shape]
        if len(labels) > 1 and len(set(labels)) == 1:
            yield DataError(
                f"every row has the same {name}, so there is nothing to tell apart",
                where="data.train",
                given=f"{labels[0][0]:g} {len(labels)} times",
                do=f"see that the column {name} is the right one",
            )


def _belonging(example: Example) -> set[int]:
    """Keys of the documents that belong to the query, in this row."""
    return {text.key for text, label in zip(example.documents, example.labels, strict=True) if label > 0}


def _contradicts(example: Example) -> bool:
    """Whether a document is both what belongs to the query and what does not."""
    belonging = _belonging(example)
    pairs = zip(example.documents, example.labels, strict=True)
    return any(label <= 0 and text.key in belonging for text, label in pairs)
