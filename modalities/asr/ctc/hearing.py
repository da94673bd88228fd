"""Input of CTC models: samples or mel features of an utterance alone, as the model's own feature extractor gives them,
and the pieces of streaming."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ....common.errors import unreadable_model
from ..extractor import Extractor
from .config import StreamSection
from .model import frames
from .vocabulary import FAMILY


@dataclass(frozen=True)
class Piece:
    """A stretch of a recording that is run through the model at once.

    Args:
        first: first sample.
        last: last sample, excluded.
        begin: of the model's frames for it, the first that is kept.
        end: the last that is kept, excluded; None: all from `begin`.
    """

    first: int
    last: int
    begin: int = 0
    end: int | None = None


class Hearing(Extractor):
    """What a model hears of samples, and the frames that it makes of them.

    Args:
        path: directory with the feature extractor.
        config: the model's configuration.
    """

    def __init__(self, path: str, config: Any):
        from transformers import AutoFeatureExtractor

        try:
            super().__init__(AutoFeatureExtractor.from_pretrained(path))
        except (OSError, ValueError) as error:
            raise unreadable_model(path, error, FAMILY) from error
        self.config = config
        self.frames = lru_cache(maxsize=1 << 16)(self._frames)
        self.samples_per_frame = 20 * self.rate // (self.frames(40 * self.rate) - self.frames(20 * self.rate))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "frames"}  # for data workers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.frames = lru_cache(maxsize=1 << 16)(self._frames)

    def _frames(self, samples: int) -> int:
        """Frames of the model's output for so many samples."""
        length = samples if self.raw else self._mel_frames(samples)
        return int(frames(self.config, torch.tensor([length]))[0])

    def _mel_frames(self, samples: int) -> int:
        """Feature frames of so many samples."""
        name = type(self.extractor).__name__
        if name == "SeamlessM4TFeatureExtractor":  # windows of 25 ms every 10 ms, joined in groups
            return (1 + max(samples - 400, -160) // 160) // int(self.extractor.stride)
        if name == "ParakeetFeatureExtractor":
            return samples // int(self.extractor.hop_length)
        return self(torch.zeros(samples).numpy()).shape[1]

    # ------------------------------------------------------------------ streaming

    def pieces(self, samples: int, section: StreamSection | None) -> list[Piece]:
        """How a recording is run: as a whole, or in pieces whose kept frames join to those of the whole."""
        if section is None:
            return [Piece(0, samples)]
        hop = self.samples_per_frame
        chunk, left, right = (
            round(seconds * self.rate / hop)
            for seconds in (section.chunk_seconds, section.left_seconds, section.right_seconds)
        )
        chunk, total = max(1, chunk), self.frames(samples)
        found = []
        for core in range(0, max(total, 1), chunk):
            first = max(0, core - left)
            last = samples if core + chunk + right >= total else self._reach(core + chunk + right - first) + first * hop
            end = None if core + chunk >= total else core + chunk - first
            found.append(Piece(first * hop, min(last, samples), core - first, end))
        return found

    def _reach(self, number: int) -> int:
        """Fewest samples that give so many frames."""
        samples = number * self.samples_per_frame
        while self.frames(samples) < number:
            samples += self.samples_per_frame
        return samples
