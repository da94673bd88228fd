"""Random changes of training audio: speed, room, noise and gain of the samples, masks over the features.

All randomness comes from the generator that the caller gives, such as `np.random.default_rng((seed, epoch, index))`,
so an example of an epoch is the same in every process and after every resume.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile as sf  # type: ignore[import-untyped]
import soxr  # type: ignore[import-untyped]
from torch import Tensor

from ...common.errors import DataError
from .audio import Wave, header, read
from .sections import AugmentSection
from .utterance import Utterance


class Augment:
    """The changes that a recipe asks for.

    Args:
        section: which changes, and how strong.
        rate: samples per second of the audio that `wave` gets.

    Raises:
        DataError: a folder of noises or room responses holds no audio.
    """

    def __init__(self, section: AugmentSection, rate: int):
        self.section, self.rate = section, rate
        self._noises = _recordings(section.noise_folder)
        self._rooms = _recordings(section.reverb_folder)

    @property
    def changes_wave(self) -> bool:
        """Whether `wave` ever does anything; if so, its features differ in each epoch."""
        return self.section.varies_audio

    @property
    def changes_features(self) -> bool:
        """Whether `features` ever does anything."""
        return bool(self.section.time_masks or self.section.frequency_masks)

    @property
    def max_speed_stretch(self) -> float:
        """The most that an example's duration can grow, as a factor from 1."""
        return max([1.0, *(1 / factor for factor in self.section.speed)])

    def wave(self, samples: Wave, generator: np.random.Generator, max_samples: int | None = None) -> Wave:
        """A changed copy of mono audio: speed, then room, noise and gain; scaled down where its peak would pass 1.

        Args:
            samples: float32 [T].
            max_samples: speeds that would make the audio longer than this are not drawn.

        Returns:
            float32 [T / speed].

        Raises:
            BadExample: a recording of noise or of a room's response is broken; `where` names it.
        """
        section = self.section
        if not self.changes_wave:
            return samples
        samples = self._speed(samples, generator, max_samples)
        if self._rooms and generator.random() < section.reverb_probability:
            samples = reverberate(samples, self._room(generator))
        if self._noises and section.noise_snr_db and generator.random() < section.noise_probability:
            snr = generator.uniform(*section.noise_snr_db)
            samples = add_noise(samples, self._noise(len(samples), generator), snr)
        if section.gain_db:
            samples = samples * np.float32(10 ** (generator.uniform(*section.gain_db) / 20))
        peak = np.abs(samples).max(initial=0.0)
        return samples / peak if peak > 1 else samples

    def features(self, mel: Tensor, generator: np.random.Generator) -> Tensor:
        """SpecAugment: a copy of features [F, T] with stretches of time and bands of frequency set to their mean.

        `mel` holds an example's own frames, without padding, so that the masks cover the stated share of it. The mean
        is that of the unmasked features.
        """
        if not self.changes_features:
            return mel
        section, (bins, frames) = self.section, mel.shape
        masked, mean = mel.clone(), mel.mean()
        for _ in range(section.time_masks):
            begin, end = _stretch(frames, int(section.time_mask_max * frames), generator)
            masked[:, begin:end] = mean
        for _ in range(section.frequency_masks):
            begin, end = _stretch(bins, min(section.frequency_mask_max, bins), generator)
            masked[begin:end] = mean
        return masked

    def _speed(self, samples: Wave, generator: np.random.Generator, max_samples: int | None) -> Wave:
        longest = math.inf if max_samples is None else max_samples
        factors = [factor for factor in self.section.speed if math.ceil(len(samples) / factor) <= longest]
        if not factors:
            return samples
        factor = factors[generator.integers(len(factors))]
        return samples if factor == 1 else change_speed(samples, self.rate, factor)

    def _room(self, generator: np.random.Generator) -> Wave:
        file = self._rooms[generator.integers(len(self._rooms))]
        return read(_whole(file), self.rate, "first")

    def _noise(self, length: int, generator: np.random.Generator) -> Wave:
        """Noise [length] from a random place of a random file; a shorter file is repeated."""
        recording = _whole(self._noises[generator.integers(len(self._noises))])
        place, needed, seconds = generator.random(), length / self.rate, header(recording).seconds
        if seconds > needed:
            start = place * (seconds - needed)
            recording = replace(recording, start=start, end=start + needed)
        noise = read(recording, self.rate, "mean")
        if seconds <= needed:
            noise = np.roll(noise, int(place * len(noise)))
        return np.resize(noise, length)


def change_speed(samples: Wave, rate: int, factor: float) -> Wave:
    """Audio [T] played `factor` times as fast, [T / factor]; the pitch goes with it."""
    return np.asarray(soxr.resample(samples, rate * factor, rate, quality="HQ"), dtype=np.float32)


def add_noise(samples: Wave, noise: Wave, snr_db: float) -> Wave:
    """Audio plus noise, both [T], the noise scaled so that the ratio of their mean powers is `snr_db`.

    Where one of the two is all zeros there is no such ratio, and the audio stays as it is.
    """
    signal_power, noise_power = _power(samples), _power(noise)
    if signal_power == 0 or noise_power == 0:
        return samples
    scale = math.sqrt(signal_power / noise_power / 10 ** (snr_db / 10))
    return samples + np.float32(scale) * noise


def reverberate(samples: Wave, response: Wave) -> Wave:
    """Audio [T] as heard in a room: convolved with its impulse response [R].

    The direct sound (the response's peak) stays in place, what sounds after the end is dropped, and the mean power is
    that of the input, so that times and levels stay right.
    """
    length = len(samples) + len(response) - 1
    size = 1 << (length - 1).bit_length()
    spectrum = np.fft.rfft(samples, size) * np.fft.rfft(response, size)
    direct = int(np.abs(response).argmax())
    echoed = np.fft.irfft(spectrum, size)[direct : direct + len(samples)].astype(np.float32)
    power = _power(echoed)
    return echoed * np.float32(math.sqrt(_power(samples) / power)) if power > 0 else samples


def _power(samples: Wave) -> float:
    return float(np.square(samples, dtype=np.float64).mean())


def _stretch(size: int, longest: int, generator: np.random.Generator) -> tuple[int, int]:
    """Begin and end of a random stretch of 0 to `longest` within `size`."""
    length = int(generator.integers(longest + 1))
    begin = int(generator.integers(size - length + 1))
    return begin, begin + length


def _whole(file: str) -> Utterance:
    return Utterance(audio=file, text="", where=file)


def _recordings(folder: str | None) -> list[str]:
    """The audio files of a folder and all below, sorted, so that the same draw gives the same file everywhere."""
    if folder is None:
        return []
    suffixes = {f".{name.lower()}" for name in sf.available_formats()} - {".raw"}
    files = sorted(str(file) for file in Path(folder).rglob("*") if file.suffix.lower() in suffixes and file.is_file())
    if not files:
        raise DataError("the folder holds no audio files", where=folder, expected="wav, flac, ogg or mp3 files")
    return files
