"""Examples of embedding and reranker training: a query, and the documents that it is compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Shape = Literal["groups", "scored", "classes", "labelled"]

NOTHING: Mapping[str, Any] = {}


def key_of(text: str) -> int:
    """A text as a number of 63 bits, the same in any run; what tells whether two texts are the same."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text as the model reads it.

    Args:
        ids: [T] int32 tokens, special ones and those of the prompt included.
        key: `key_of` the text without prompt.
        prompt: tokens of the prompt at the begin, the special ones before it included; 0: no prompt.
        second: where the second of two texts begins that are read together (a reranker's document); 0: there is one.
        cut: tokens cut off.
    """

    ids: np.ndarray
    key: int
    prompt: int = 0
    second: int = 0
    cut: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """What one row of a data set gives.

    For a reranker, the tokens of a document are those of query and document together, and the query has none.

    Args:
        query: None: a document that belongs to no query, as most of a corpus.
        documents: what the query is compared with; none in a `labelled` row.
        labels: of each document: its relevance, 1, 0 or graded (`groups`), its similarity (`scored`) or the class of
            the pair (`classes`); of the query itself if there are no documents: its class (`labelled`).
        scores: a teacher's, of each document; or none.
        source: which data set it comes from, as its place in `EmbeddingProcessing.sources`.
        where: place in the data set, `file:line`.
        shape: what the labels are.
        known: sorted keys of the documents that are relevant to this query anywhere in its data set.
        fields: what it may be sliced by; only in an evaluation.
    """

    query: Text | None
    documents: tuple[Text, ...]
    labels: tuple[float, ...]
    scores: tuple[float, ...]
    source: int
    where: str
    shape: Shape = "groups"
    known: tuple[int, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=lambda: NOTHING)

    @property
    def texts(self) -> tuple[Text, ...]:
        return self.documents if self.query is None else (self.query, *self.documents)

    @property
    def tokens(self) -> int:
        """Tokens of all its texts."""
        return sum(len(text.ids) for text in self.texts)

    @property
    def cut(self) -> int:
        """Tokens cut off its texts."""
        return sum(text.cut for text in self.texts)
