"""Rankings of documents for many queries at once."""

from __future__ import annotations

import numpy as np

FOUND = np.dtype([("document", "<i8"), ("score", "<f4")])
"""A place in a ranking: a document's number, -1 where there is none, and its score."""

FUSION = 60
"""Constant of reciprocal rank fusion (Cormack et al., 2009)."""


def places(documents: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Documents and scores of the same shape as `FOUND`; where a document is -1, the score is -inf."""
    found = np.empty(documents.shape, FOUND)
    found["document"] = documents
    found["score"] = np.where(documents < 0, -np.inf, scores)
    return found


def nothing(queries: int, depth: int) -> np.ndarray:
    """Empty rankings [queries, depth]."""
    return places(np.full((queries, depth), -1), np.zeros((queries, depth)))


def best(found: np.ndarray, depth: int) -> np.ndarray:
    """The places [Q, depth] with the highest scores; of equal ones, the document that comes first."""
    order = np.lexsort((found["document"], -found["score"]), axis=-1)[:, :depth]
    chosen: np.ndarray = np.take_along_axis(found, order, axis=1)
    return chosen


def merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of rankings [Q, K] and [Q, L] of different documents the best K."""
    return best(np.concatenate([one, other], axis=1), one.shape[1])


def fused(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Two rankings [Q, K] and [Q, L] of the same documents as one [Q, K + L], by reciprocal rank fusion.

    A document's score is the sum of 1 / (60 + its rank) over the rankings that it is in.
    """
    documents = np.concatenate([one["document"], other["document"]], axis=1)
    ranks = np.concatenate([np.arange(1, found.shape[1] + 1) for found in (one, other)])
    scores = np.broadcast_to(1.0 / (FUSION + ranks), documents.shape)
    order = np.argsort(documents, axis=1, kind="stable")
    documents, scores = np.take_along_axis(documents, order, 1), np.take_along_axis(scores, order, 1)
    twice = documents[:, 1:] == documents[:, :-1]
    scores[:, :-1] += np.where(twice, scores[:, 1:], 0.0)
    documents[:, 1:][twice] = -1
    return best(places(documents, scores), documents.shape[1])
