"""Dense retrieval: embeddings on disk, searched a shard of documents at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ....common.console import progress
from .ranking import best, merged, nothing, places
from .stage import Stage
from .texts import Texts

_TOGETHER = 64
"""Queries whose documents' embeddings are compared at once."""


class Vectors:
    """Embeddings [N, D] in files of equal size; only what is asked for is read.

    Args:
        parts: the files' arrays.
        piece: rows of each but the last.
    """

    def __init__(self, parts: list[np.ndarray], piece: int):
        self.parts, self.piece = parts, piece

    def __len__(self) -> int:
        return self.piece * (len(self.parts) - 1) + len(self.parts[-1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows from `start` to before `stop`."""
        first, last = start // self.piece, (stop - 1) // self.piece
        cuts = [
            self.parts[at][max(start - at * self.piece, 0) : stop - at * self.piece] for at in range(first, last + 1)
        ]
        return np.concatenate(cuts)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Rows [n, D] by their numbers [n]."""
        found = np.empty((len(numbers), self.parts[0].shape[1]), np.float32)
        files = numbers // self.piece
        for file in np.unique(files):
            here = files == file
            found[here] = self.parts[file][numbers[here] - file * self.piece]
        return found


def embed(texts: Texts, stage: Stage, piece: int, encode: Callable[[list[str]], np.ndarray]) -> Vectors:
    """Embeddings of all texts, a file for each `piece` of them."""

    def make(start: int) -> np.ndarray:
        return encode(texts[start : start + piece])

    parts: list[np.ndarray] = []
    with progress(f"embedding {stage.folder.name}", "texts") as show:
        for start in range(0, len(texts), piece):
            parts.append(stage.array(f"{start // piece:06d}", partial(make, start)))
            show(min(start + piece, len(texts)), len(texts))
    return Vectors(parts, piece)


def search(queries: Vectors, documents: Vectors, block: range, depth: int, shard: int) -> np.ndarray:
    """The documents most similar to each query.

    Memory holds a shard of documents at a time, so the corpus may be of any size. The similarities that decide between
    the documents found are computed anew, one by one: those of the search differ in the last digits by what else is
    searched at once.

    Args:
        block: the queries.
        depth: documents for each.
        shard: documents in memory at once; the result does not depend on it.

    Returns:
        [block, depth] `ranking.FOUND`, the most similar first.
    """
    import faiss

    asked = queries.rows(block.start, block.stop)
    found = nothing(len(block), depth)
    for start in range(0, len(documents), shard):
        part = documents.rows(start, min(start + shard, len(documents)))
        index = faiss.IndexFlatIP(part.shape[1])
        index.add(part)
        scores, numbers = index.search(asked, min(depth, len(part)))
        found = merged(found, places(numbers + start, scores))
    return best(places(found["document"], similarities(asked, documents, found["document"])), depth)


def similarities(asked: np.ndarray, documents: Vectors, numbers: np.ndarray) -> np.ndarray:
    """Inner products [Q, K] of queries [Q, D] with documents of these numbers [Q, K]; 0 where a number is -1."""
    found = np.zeros(numbers.shape, np.float32)
    for start in range(0, len(asked), _TOGETHER):
        here = slice(start, start + _TOGETHER)
        wanted = numbers[here]
        vectors = documents.take(np.maximum(wanted, 0).ravel()).reshape(*wanted.shape, -1)
        products = (vectors.astype(np.float64) * asked[here, None, :]).sum(axis=-1)
        found[here] = np.where(wanted < 0, 0.0, products)
    return found
