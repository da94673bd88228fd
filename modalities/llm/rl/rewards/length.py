"""Rewards that shape how long an answer is, and that it does not repeat itself: functions of numbers and words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .answer import Answer, Scorer, Unscored, each
from .config import Cosine, Overlong, Repetition


def overlong_penalty(tokens: int, max_length: int, cache: int) -> float:
    """The soft overlong punishment of DAPO (Yu et al., arXiv:2503.14476, eq. 13), from 0 to -1.

    Args:
        tokens: of the completion.
        max_length: tokens from which it is -1.
        cache: tokens before that over which it falls.
    """
    return min(0.0, max(-1.0, (max_length - cache - tokens) / cache))


def cosine(tokens: int, max_length: int, at_start: float, at_end: float) -> float:
    """Half a cosine from `at_start` at 0 tokens to `at_end` at `max_length` (Yeo et al., arXiv:2502.03373)."""
    return at_end + 0.5 * (at_start - at_end) * (1.0 + math.cos(math.pi * tokens / max_length))


def repeated_share(text: str, size: int) -> float:
    """The share of n-grams of words, whatever their case, that stood before already."""
    words = text.lower().split()
    grams = [tuple(words[at : at + size]) for at in range(len(words) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def overlong(section: Overlong) -> Scorer:
    """See `config.Overlong`."""
    return each(lambda answer: overlong_penalty(answer.tokens, section.max_length, section.cache))


def repetition(section: Repetition) -> Scorer:
    """See `config.Repetition`."""
    return each(lambda answer: -repeated_share(answer.completion, section.size))


def shaped(section: Cosine, correct: Scorer) -> Scorer:
    """See `config.Cosine`.

    Args:
        correct: says whether an answer is right.
    """

    def value(answer: Answer, right: bool) -> float:
        if not answer.finished or answer.tokens >= section.max_length:
            return section.exceeded
        ends = (section.right_short, section.right_long) if right else (section.wrong_short, section.wrong_long)
        return cosine(answer.tokens, section.max_length, *ends)

    def scorer(answers: Sequence[Answer]) -> list[float | Unscored | None]:
        found = correct(answers)
        known = [one if one is None or isinstance(one, Unscored) else float(one) for one in found]
        return [
            value(answer, one >= section.threshold) if isinstance(one, float) else one
            for answer, one in zip(answers, known, strict=True)
        ]

    return scorer
