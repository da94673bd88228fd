"""When words were said, compared with when they were said by the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..metrics import Scored, words_output
from ..text import normalize, words
from ..utterance import Segment


@dataclass(frozen=True)
class _Word:
    """A word; times in seconds, known for the first and the last word of a stretch only."""

    text: str
    start: float | None
    end: float | None


def compared(records: Sequence[Scored]) -> dict[str, float]:
    """Errors of the times, over all records whose reference has segments and whose hypothesis has times.

    Words are aligned (minimal edit distance, after normalising). Where the first word of a reference segment is the
    first of a timed stretch of the hypothesis, and both agree, their starts are compared; likewise the ends of last
    words.

    Returns:
        `start_error`, `end_error`: mean absolute differences in seconds; `timed`: number of compared times. Empty where
        there is nothing to compare.
    """
    starts: list[float] = []
    ends: list[float] = []
    for record in records:
        if record.segments and record.times:
            for said, heard in _pairs(record):
                if said.start is not None and heard.start is not None:
                    starts.append(abs(said.start - heard.start))
                if said.end is not None and heard.end is not None:
                    ends.append(abs(said.end - heard.end))
    found: dict[str, float] = {}
    if starts:
        found["start_error"] = sum(starts) / len(starts)
    if ends:
        found["end_error"] = sum(ends) / len(ends)
    return {**found, "timed": len(starts) + len(ends)} if found else {}


def _pairs(record: Scored) -> Iterable[tuple[_Word, _Word]]:
    """The words that the two have in common, by alignment."""
    said, heard = _timed(record.segments, record.language), _timed(record.times, record.language)
    if not said or not heard:
        return
    output = words_output(" ".join(word.text for word in said), " ".join(word.text for word in heard))
    for chunk in output.alignments[0]:
        if chunk.type == "equal":
            yield from zip(
                said[chunk.ref_start_idx : chunk.ref_end_idx],
                heard[chunk.hyp_start_idx : chunk.hyp_end_idx],
                strict=True,
            )


def _timed(segments: Iterable[Segment], language: str | None) -> list[_Word]:
    found = []
    for segment in segments:
        spoken = words(normalize(segment.text, language), language)
        last = len(spoken) - 1
        found += [
            _Word(word, segment.start if at == 0 else None, segment.end if at == last else None)
            for at, word in enumerate(spoken)
        ]
    return found
