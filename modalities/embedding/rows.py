"""A row of a data set once it is known which column is what: still text, not yet tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .example import NOTHING, Shape


@dataclass(frozen=True, slots=True)
class Row:
    """Texts that are compared, and how they are related; see `Example`.

    Args:
        shape: what the labels are.
        query: None: a document that belongs to no query.
        documents: what the query is compared with.
        labels: of each document; of the query if there are no documents.
        scores: a teacher's, of each document; or none.
        where: place in the data set, `file:line`.
        source: which data set it comes from, as its place in `EmbeddingProcessing.sources`.
        fields: all other columns, usable as slices.
    """

    shape: Shape
    query: str | None
    documents: tuple[str, ...]
    labels: tuple[float, ...]
    scores: tuple[float, ...]
    where: str
    source: int
    fields: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
