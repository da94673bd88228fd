"""From a CTC model's frames to text: the best label of each frame, or a beam search with a language model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ..text import is_unsegmented
from ..utterance import Segment
from .spelling import Labels


def timed_words(ids: Sequence[int], labels: Labels, seconds: float, language: str | None) -> tuple[Segment, ...]:
    """The words that the best labels spell, with the times of their first and last frame.

    Args:
        ids: best label of each frame [T].
        labels: of the model.
        seconds: length of a frame.
        language: where it writes no spaces, a word is a character.
    """
    spoken: list[tuple[str, int, int]] = []
    frame = 0
    for label, run in groupby(ids):
        last = frame + len(list(run))
        if label != labels.blank:
            spoken.append((labels.piece(label), frame, last))
        frame = last
    alone = is_unsegmented(language)
    words: list[tuple[str, int, int]] = []
    apart = True
    for piece, first, last in spoken:
        text = piece.strip()
        apart = apart or alone or piece.startswith(" ")
        if text and apart:
            words.append((text, first, last))
        elif text:
            words[-1] = (words[-1][0] + text, words[-1][1], last)
        apart = not text or piece.endswith(" ")
    return tuple(Segment(first * seconds, last * seconds, text) for text, first, last in words)
