"""Which of a query's candidates become its negatives."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..example import key_of
from .pool import Pool
from .ranking import nothing
from .settings import Settings


def candidates(settings: Settings, pool: Pool, block: range, found: np.ndarray, dropped: Counter[str]) -> np.ndarray:
    """Of what was retrieved, the ranks from `first` to `last`.

    A known positive has no rank, nor has a text that differs only by case and blanks from the query, a positive or a
    document ranked before.

    Args:
        block: the queries.
        found: [Q, K] `ranking.FOUND`, what was retrieved for each.
        dropped: counts what was passed over, by reason.

    Returns:
        [Q, last - first + 1] `ranking.FOUND`, filled from the left.
    """
    kept = nothing(len(block), settings.last - settings.first + 1)
    for at, query in enumerate(block):
        known = {int(document) for document in pool.known(query)}
        seen = {plain(pool.queries[query]), *(plain(pool.documents[document]) for document in known)}
        rank = 0
        for place, document in enumerate(found["document"][at].tolist()):
            if document < 0 or rank == settings.last:
                break
            if document in known:
                dropped["known"] += 1
                continue
            form = plain(pool.documents[document])
            if form in seen:
                dropped["duplicate"] += 1
                continue
            seen.add(form)
            rank += 1
            if rank < settings.first:
                dropped["window"] += 1
            else:
                kept[at, rank - settings.first] = found[at, place]
    return kept


def plain(text: str) -> str:
    """A text without what does not tell it apart: case and blanks."""
    return " ".join(text.casefold().split())


def false_negatives(settings: Settings, scores: np.ndarray, positive: float, dropped: Counter[str]) -> np.ndarray:
    """Which candidates are so close to the query that they are rather unknown positives.

    The share of a positive's score is taken from its size, so that it lies below the score also where that is negative:
    0.95 of -2 is -2.1.

    Args:
        scores: [N] of the candidates.
        positive: score of the query's positive, of several the lowest.
        dropped: counts them, by reason.

    Returns:
        [N] bool.
    """
    values = scores.astype(np.float64)
    close = np.zeros(len(values), bool)
    if settings.margin is not None:
        close |= values > positive - settings.margin
    if settings.least_share:
        share = settings.least_share if positive >= 0 else 2 - settings.least_share
        close |= values >= positive * share
    dropped["margin"] += int(close.sum())
    if settings.max_similarity is None:
        return close
    similar = ~close & (values > settings.max_similarity)
    dropped["similarity"] += int(similar.sum())
    return close | similar


def choose(settings: Settings, query: str, scores: np.ndarray | None, left: np.ndarray) -> np.ndarray:
    """The negatives among candidates, best first.

    Args:
        query: decides with the seed what is drawn, so that it depends on no other query.
        scores: [N] of all candidates by a cross-encoder, highest first; None: they are in the order of their ranks.
        left: numbers of the candidates that are no false negatives, in the order of their ranks.

    Returns:
        numbers of at most `negatives` candidates.
    """
    if settings.sample == "random" and len(left) > settings.negatives:
        drawn = np.random.default_rng([settings.seed, key_of(query)])
        left = np.sort(drawn.choice(left, settings.negatives, replace=False))
    if scores is not None:
        left = left[np.argsort(-scores[left], kind="stable")]
    return left[: settings.negatives]
