"""Pairs of texts that are nearly the same: MinHash over stretches of words or tokens (Broder, 1997), each pair that the
sketches find checked exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

STRETCH = 3
"""Words or tokens in one stretch."""
ALIKE = 0.8
"""Share of the stretches of both that two texts have in common, from which they are nearly the same (Jaccard)."""
BANDS, ROWS = 24, 4
"""Sketches of two texts with 0.8 in common are equal in a band of 4 with the probability 0.8^4 = 0.41; in none of 24
with 0.59^24, three in a million."""
CROWD = 50
"""Of more texts than this in one bucket, each is compared with the first only."""


def pairs(texts: Sequence[Sequence[Any]], alike: float = ALIKE) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, of texts that have at least so much in common; those shorter than a stretch are left out.

    Args:
        texts: words or tokens of each.
        alike: from which share of stretches in common.
    """
    known: dict[Any, int] = {}
    stretches = [_stretches(text, known) for text in texts]
    places = [at for at, own in enumerate(stretches) if len(own)]
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    multiply = np.random.default_rng(0).integers(1, 2**63, BANDS * ROWS, dtype=np.uint64) | np.uint64(1)
    for at in places:
        sketch = _sketch(stretches[at], multiply).reshape(BANDS, ROWS)
        for band, part in enumerate(sketch):
            buckets[band, part.tobytes()].append(at)
    candidates = {
        pair
        for members in buckets.values()
        for pair in (combinations(members, 2) if len(members) <= CROWD else ((members[0], m) for m in members[1:]))
    }
    return sorted(pair for pair in candidates if _common(stretches[pair[0]], stretches[pair[1]]) >= alike)


def _stretches(text: Sequence[Any], known: dict[Any, int]) -> np.ndarray:
    """[S] a number of each stretch that differs; texts of one stretch are the whole."""
    ids = np.array([known.setdefault(unit, len(known) + 1) for unit in text], dtype=np.uint64)
    if len(ids) < STRETCH:
        return ids[:0]
    found = np.zeros(len(ids) - STRETCH + 1, dtype=np.uint64)
    for at in range(STRETCH):  # a polynomial modulo 2^64, mixed so that all bits of a product count
        found = (found * np.uint64(0x9E3779B97F4A7C15)) ^ ids[at : at + len(found)]
        found ^= found >> np.uint64(29)
    return np.unique(found)


def _sketch(stretches: np.ndarray, multiply: np.ndarray) -> np.ndarray:
    """[BANDS x ROWS] smallest of the stretches under each of so many orders."""
    mixed = stretches[None] * multiply[:, None]
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    found: np.ndarray = mixed.min(axis=1)
    return found


def _common(one: np.ndarray, other: np.ndarray) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)
