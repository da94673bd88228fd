"""Long recordings in pieces with speech, by Silero VAD, whose weights come with its package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from threading import Lock
from typing import Any

import torch

from ....common.errors import missing_extra
from ..audio import examine, read
from ..sections import AudioSection
from ..utterance import Utterance

RATE = 16000
"""Samples a second that the detector hears."""

Stretch = tuple[float, float]


class Voices:
    """Cuts the recordings of an evaluation that are too long for a model.

    Args:
        section: how audio is read; `max_seconds` is the longest that the model takes, `voice` says how to cut.
        rate: samples a second that the model takes.
    """

    def __init__(self, section: AudioSection, rate: int):
        assert section.voice is not None
        self.section, self.rate, self.voice = section, rate, section.voice
        self.longest = min(section.max_seconds, section.voice.piece_seconds or math.inf)
        self._whole = section.model_copy(update={"max_seconds": math.inf})
        self._detector: Any = None
        self._lock = Lock()  # the detector has a state, and examples are checked in threads

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_detector": None, "_lock": None}  # data workers don't cut

    def pieces(self, utterance: Utterance) -> list[Utterance]:
        """The checked utterance; in pieces if it is too long.

        Raises:
            BadExample: what `audio.examine` finds, but for `too_long`.
        """
        (whole,) = examine(utterance, self._whole, self.rate)
        seconds = whole.duration or 0.0
        if seconds <= self.longest:
            return [whole]
        with self._lock:
            spoken = self._spoken(whole)
        stretches = cut(spoken, seconds, self.longest, self.voice.pad_seconds)
        return [_piece(whole, stretch, (at, len(stretches))) for at, stretch in enumerate(stretches)]

    def _spoken(self, whole: Utterance) -> list[Stretch]:
        """Where somebody speaks, in seconds from the start."""
        try:
            import silero_vad
        except ImportError as error:
            raise missing_extra("silero-vad", "vad") from error
        if self._detector is None:
            self._detector = silero_vad.load_silero_vad()
        threads = torch.get_num_threads()  # loading it sets one thread for all of torch
        try:
            found = silero_vad.get_speech_timestamps(
                torch.from_numpy(read(whole, RATE, self.section.channel)),
                self._detector,
                threshold=self.voice.threshold,
                sampling_rate=RATE,
                min_silence_duration_ms=round(1000 * self.voice.min_silence_seconds),
                max_speech_duration_s=self.longest - 2 * self.voice.pad_seconds,
                speech_pad_ms=0,
            )
        finally:
            torch.set_num_threads(threads)
        return [(part["start"] / RATE, part["end"] / RATE) for part in found]


def cut(spoken: Sequence[Stretch], seconds: float, longest: float, pad: float) -> list[Stretch]:
    """Pieces of a recording: neighbouring speech together where that fits, each with some audio around it.

    Args:
        spoken: where somebody speaks, in order.
        seconds: length of the recording.
        longest: of a piece.
        pad: audio before and after speech; of a shorter pause, its half.

    Returns:
        Pieces in order, without overlap, none longer than `longest`. Where nobody speaks, the whole in equal pieces: a
        model says by itself that there is nothing.
    """
    if not spoken:
        return _equal(0.0, seconds, longest)
    padded = []
    for at, (start, end) in enumerate(spoken):
        before = spoken[at - 1][1] if at else -math.inf
        after = spoken[at + 1][0] if at + 1 < len(spoken) else math.inf
        padded.append(
            (max(0.0, start - min(pad, (start - before) / 2)), min(seconds, end + min(pad, (after - end) / 2)))
        )
    groups = [padded[0]]
    for start, end in padded[1:]:
        if end - groups[-1][0] <= longest:
            groups[-1] = (groups[-1][0], end)
        else:
            groups.append((start, end))
    return [part for start, end in groups for part in _equal(start, end, longest)]


def _equal(start: float, end: float, longest: float) -> list[Stretch]:
    number = max(1, math.ceil((end - start) / longest - 1e-9))
    borders = [start + (end - start) * at / number for at in range(number + 1)]
    return list(pairwise(borders))


def _piece(whole: Utterance, stretch: Stretch, part: tuple[int, int]) -> Utterance:
    """A piece has no text of its own: what is said in it isn't known."""
    start, end = stretch
    return replace(
        whole,
        text="",
        start=whole.start + start,
        end=whole.start + end,
        duration=end - start,
        prompt=None,
        segments=(),
        whole=whole,
        part=part,
    )
