"""An example of speech recognition: a piece of audio and what is said in it. Immutable, with units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of an utterance with its own text; times in seconds from the utterance's start."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Utterance:
    """A piece of audio and its transcript.

    Args:
        audio: path of the file, or a function that returns its encoded bytes (data sets that hold audio inside).
        text: transcript, as written in the source.
        where: place in the source, `file:line`.
        source: name of the data set in the recipe.
        start: begin of the piece in the file, in seconds.
        end: end of the piece in the file, in seconds; None: the file's end.
        duration: length of the piece in seconds; what the source declares until the file's header is read.
        channel: channel to read; None: the recipe's rule.
        language: language code (`it`) or name; None: the recipe's.
        speaker: who speaks.
        prompt: text that precedes, given to models that take a prompt.
        segments: stretches with their own text, for timestamps and for cutting at silences.
        extra: all other fields of the row, usable as slices.
        whole: in an evaluation, the recording that this is a piece of; None: it is no piece.
        part: number of the piece, from 0, and number of pieces.
    """

    audio: str | Callable[[], bytes]
    text: str
    where: str
    source: str = ""
    start: float = 0.0
    end: float | None = None
    duration: float | None = None
    channel: int | None = None
    language: str | None = None
    speaker: str | None = None
    prompt: str | None = None
    segments: tuple[Segment, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    whole: Utterance | None = None
    part: tuple[int, int] = (0, 1)
