"""The parts of a recipe that say how audio is read, checked, varied and kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ...common.recipe import LocalOrHub, Section


def _pairs(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, Mapping) else value


Pairs = Annotated[tuple[tuple[str, Any], ...], BeforeValidator(_pairs)]
"""A mapping, kept as pairs, which can't be changed."""

ChannelRule = Literal["first", "mean"] | Annotated[int, Field(ge=0, strict=True)]
Range = tuple[float, float]


class VoiceSection(Section):
    """Cutting of recordings by voice activity (Silero VAD)."""

    threshold: float = Field(0.5, gt=0, lt=1)
    """Probability above which there is speech."""
    min_silence_seconds: float = Field(0.3, gt=0)
    """Shortest silence at which speech ends, in seconds."""
    pad_seconds: float = Field(0.2, ge=0)
    """Audio kept before and after speech, in seconds."""
    piece_seconds: float | None = Field(None, gt=1)
    """Longest piece, in seconds; null: what the model takes, `max_seconds` at most."""


class AudioSection(Section):
    """How audio is read, and what makes an example unusable."""

    channel: ChannelRule = "mean"
    """Channel of files with several: `first`, `mean` of all, or an index from 0; a row's own `channel` goes first."""
    min_seconds: float = Field(0.1, gt=0)
    """Shortest example, in seconds."""
    max_seconds: float = Field(30.0, gt=0)
    """Longest example, in seconds; audio is never clipped to it."""
    over_long: Literal["refuse", "segment"] = "refuse"
    """Longer examples: refuse them, or cut them at the borders of their `segments` (refused without any)."""
    voice: VoiceSection | None = None
    """In an evaluation, longer examples are cut by voice activity, transcribed in pieces and scored as a whole;
    absent: `over_long` applies to them."""
    silence_dbfs: float = Field(-60.0, le=0)
    """Audio whose peak, after the channels are mixed, is below this level counts as silent; dB of full scale."""
    duration_tolerance: float = Field(0.1, ge=0)
    """Allowed difference between declared and real times, in seconds; for durations, 2% if that is more."""
    scan: Literal["full", "headers"] = "full"
    """Before training, decode every file once, which finds corrupt and silent audio, or read the headers only."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_seconds > self.max_seconds:
            raise ValueError(f"min_seconds ({self.min_seconds:g}) is above max_seconds ({self.max_seconds:g})")
        return self


def _existing_folder(value: str) -> str:
    if not Path(value).is_dir():
        raise ValueError("no such folder")
    return value


Folder = Annotated[LocalOrHub, AfterValidator(_existing_folder)]
Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentSection(Section):
    """Random changes of training audio, new in each epoch; all are off by default."""

    speed: tuple[Annotated[float, Field(ge=0.5, le=2)], ...] = ()
    """Speed factors, one drawn for each example, such as `[0.9, 1.0, 1.1]`; changes pitch and duration."""
    gain_db: Range | None = None
    """Lowest and highest gain, in dB; drawn evenly."""
    noise_folder: Folder | None = None
    """Folder of noise recordings, searched with all below it."""
    noise_snr_db: Range | None = None
    """Lowest and highest ratio of speech to noise, in dB; drawn evenly."""
    noise_probability: Probability = 0.0
    """Share of the examples that get noise, as a fraction."""
    reverb_folder: Folder | None = None
    """Folder of room impulse responses, searched with all below it."""
    reverb_probability: Probability = 0.0
    """Share of the examples that get a room's echo, as a fraction."""
    time_masks: int = Field(0, ge=0)
    """Stretches of time that are masked in the features (SpecAugment, arXiv:1904.08779)."""
    time_mask_max: float = Field(0.05, gt=0, le=1)
    """Longest masked stretch, as a share of the example's own frames."""
    frequency_masks: int = Field(0, ge=0)
    """Bands of frequency that are masked in the features."""
    frequency_mask_max: int = Field(27, ge=1)
    """Widest masked band, in mel bins."""

    @property
    def varies_audio(self) -> bool:
        """Whether anything but masks is varied, so that an example's features differ from epoch to epoch."""
        return bool(self.speed or self.gain_db or self.noise_folder or self.reverb_folder)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("gain_db", "noise_snr_db"):
            bounds = getattr(self, name)
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"{name} is (lowest, highest), and {bounds[0]:g} is above {bounds[1]:g}")
        if self.time_masks * self.time_mask_max > 1:
            raise ValueError("time_masks times time_mask_max is above 1: a whole example could be masked")
        return self

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """A noise or reverb setting that could never act is a mistake."""
        _all_or_none(
            noise_folder=self.noise_folder is not None,
            noise_snr_db=self.noise_snr_db is not None,
            noise_probability=self.noise_probability > 0,
        )
        _all_or_none(
            reverb_folder=self.reverb_folder is not None,
            reverb_probability=self.reverb_probability > 0,
        )
        return self


def _all_or_none(**given: bool) -> None:
    if len(set(given.values())) == 2:
        present = " and ".join(name for name, is_given in given.items() if is_given)
        absent = " and ".join(name for name, is_given in given.items() if not is_given)
        raise ValueError(f"{present} needs {absent} too")


class CacheSection(Section):
    """Features kept on disk between epochs and runs; of use when the audio itself isn't varied."""

    folder: str | None = None
    """Folder of the cache, made if absent; null: no cache."""
    max_gb: float = Field(10.0, gt=0)
    """Most space of the cache, in GB (10^9 bytes); the files unused for longest make room."""
