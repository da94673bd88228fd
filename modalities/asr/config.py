"""The parts of a recipe that every speech recogniser shares."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ...common.recipe import BatchSection, DataSection, EvaluateSection
from .sections import AudioSection, AugmentSection, CacheSection


class SpeechBatch(BatchSection):
    seconds: float | None = Field(None, gt=0)
    """Most padded audio in a batch (longest example times number of examples), in seconds."""

    def budget(self) -> float | None:
        return self.seconds


class SpeechData(DataSection):
    batch: SpeechBatch = SpeechBatch()
    """Bounds of one batch on one device."""
    audio: AudioSection = AudioSection()
    """How audio is read and checked."""
    augment: AugmentSection = AugmentSection()
    """Random changes of training audio."""
    cache: CacheSection = CacheSection()
    """Features kept on disk."""

    @model_validator(mode="after")
    def _cacheable(self) -> Self:
        if self.cache.folder and self.augment.varies_audio:
            raise ValueError(
                "data.cache keeps features of the audio as it is, and data.augment varies the audio (speed, gain_db, "
                "noise or reverb); masks alone can be combined with it"
            )
        return self


class SpeechEvaluate(EvaluateSection):
    slices: tuple[str, ...] = ("language", "duration")
    """Fields by which metrics are also given: `language`, `duration` (in bins), `source`, `speaker`, or any field of
    the rows."""
    max_new_tokens: int = Field(225, ge=1)
    """Most tokens of a transcript."""
    num_beams: int = Field(1, ge=1)
    """Beams of the search; 1 is greedy."""
