"""Log-mel features as Whisper takes them, computed over the real audio only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...common.errors import ModelError

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

_FLOOR = 1e-10
_RANGE = 8.0
_SHADES = " ░▒▓█"


class LogMel:
    """The features of transformers' `WhisperFeatureExtractor` (its torch path) without its padding to 30 s.

    That extractor pads a clip with zeros to `max_samples` and transforms all of it. Frames that meet no real audio are
    one constant, so only the others are computed here, and `pad` adds the constant. After padding to `max_frames` the
    values are the extractor's, within float32 rounding; a shorter context is its beginning.

    Args:
        filters: mel filters, [n_fft / 2 + 1, F].
        rate: samples per second.
        n_fft: samples in a window.
        hop: samples between frames.
        max_samples: length that the extractor pads to, in samples.
    """

    def __init__(self, filters: npt.ArrayLike, *, rate: int, n_fft: int, hop: int, max_samples: int):
        self.rate, self.n_fft, self.hop, self.max_samples = rate, n_fft, hop, max_samples
        self._filters = torch.as_tensor(np.asarray(filters), dtype=torch.float32).T.contiguous()
        self._window = torch.hann_window(n_fft)

    @classmethod
    def from_extractor(cls, extractor: WhisperFeatureExtractor) -> LogMel:
        """The same features as `extractor` gives.

        Raises:
            ModelError: the extractor adds noise (`dither`), or pads with another value than 0.
        """
        for name in ("dither", "padding_value"):
            value = getattr(extractor, name, 0.0)
            if value != 0.0:
                problem = f"a feature extractor with {name} is not supported"
                raise ModelError(problem, given=value, expected=0.0, do=f"set {name} to 0 in preprocessor_config.json")
        return cls(
            extractor.mel_filters,
            rate=extractor.sampling_rate,
            n_fft=extractor.n_fft,
            hop=extractor.hop_length,
            max_samples=extractor.n_samples,
        )

    @property
    def bins(self) -> int:
        """Number of mel bins, F."""
        return self._filters.shape[0]

    @property
    def max_frames(self) -> int:
        """Frames of `max_samples`."""
        return self.max_samples // self.hop

    @property
    def settings(self) -> str:
        """All that decides the values, as a text for cache keys."""
        filters = hashlib.sha256(self._filters.numpy().tobytes()).hexdigest()[:16]
        return f"logmel rate={self.rate} n_fft={self.n_fft} hop={self.hop} max={self.max_samples} filters={filters}"

    def frames(self, samples: int) -> int:
        """Number of frames that a clip of so many samples reaches: up to two more than ceil(samples / hop).

        A frame is centred on a multiple of `hop`, so its window begins half a window before.
        """
        # The window's first weight is 0, hence 2 rather than 1.
        return min((samples + self.n_fft // 2 - 2) // self.hop + 1, self.max_frames)

    def __call__(self, wave: npt.NDArray[np.float32] | Tensor) -> Tensor:
        """Features float32 [F, frames(T)] of a mono clip float32 [T] at `rate`.

        Raises:
            ValueError: the clip is longer than `max_samples`, or not one-dimensional.
        """
        wave = torch.as_tensor(wave, dtype=torch.float32)
        if wave.dim() != 1 or len(wave) > self.max_samples:
            raise ValueError(f"expected mono audio of at most {self.max_samples} samples, got {tuple(wave.shape)}")
        spectrum = torch.stft(
            self._framed(wave), self.n_fft, self.hop, window=self._window, center=False, return_complex=True
        )
        power = spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)
        mel = (self._filters @ power).clamp_(min=_FLOOR).log10_()
        return mel.clamp_(min=mel.max() - _RANGE).add_(4.0).div_(4.0)

    def _framed(self, wave: Tensor) -> Tensor:
        """The samples that the frames cover, as if the padded clip were mirrored at both ends."""
        half = self.n_fft // 2
        whole = wave.new_zeros((self.frames(len(wave)) - 1) * self.hop + self.n_fft)
        audio = whole[half:]
        audio[: len(wave)] = wave
        whole[:half] = audio[1 : half + 1].flip(0)
        beyond = len(audio) - self.max_samples
        if beyond > 0:
            audio[-beyond:] = audio[self.max_samples - 1 - beyond : self.max_samples - 1].flip(0)
        return whole

    @staticmethod
    def pad_value(mel: Tensor) -> float:
        """The value of the frames after the audio's, from the features [F, T] (before any masking)."""
        return max((-10.0 + 4.0) / 4.0, float(mel.max()) - _RANGE / 4.0)

    def pad(self, mels: Sequence[Tensor], frames: int, values: Sequence[float] | None = None) -> Tensor:
        """One batch [B, F, frames] of features [F, T_i] of different lengths.

        Args:
            values: `pad_value` of each, where masking may have taken the loudest place out of `mels`.

        Raises:
            ValueError: features are longer than `frames`.
        """
        longest = max(mel.shape[1] for mel in mels)
        if longest > frames:
            raise ValueError(f"features of {longest} frames don't fit into {frames}")
        batch = mels[0].new_empty(len(mels), mels[0].shape[0], frames)
        for row, mel, value in zip(batch, mels, values or map(self.pad_value, mels), strict=True):
            row[:, : mel.shape[1]] = mel
            row[:, mel.shape[1] :] = value
        return batch


def draw(mel: Tensor, columns: int = 72, rows: int = 8) -> str:
    """Features [F, T] as lines of text, high frequencies on top, time to the right; darker is louder."""
    small = torch.nn.functional.adaptive_avg_pool2d(mel[None], (rows, min(columns, mel.shape[1])))[0].flip(0)
    low, high = small.min(), small.max()
    levels = ((small - low) / (high - low).clamp(min=1e-9) * (len(_SHADES) - 1)).round().int().tolist()
    return "\n".join("".join(_SHADES[level] for level in line) for line in levels)
