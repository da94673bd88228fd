"""Spoken commands of a small grammar, in several voices, at varying speed and in noise."""

from __future__ import annotations

import itertools
import json
import wave
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .espeak import Engine

VERBS = ("take", "find", "drop", "move", "push")
COLOURS = ("red", "blue", "green", "black", "white")
OBJECTS = ("box", "lamp", "spoon", "chair", "ball", "mirror")
PLACES = ("", "here", "outside", "upstairs", "tomorrow")

VOICES = ("en-us", "en-us+m1", "en-us+m3", "en-us+m7", "en-us+f2", "en-us+f3", "en-us+f5")
UNHEARD_VOICE = "en-us+f4"  # speaks in the test only


@dataclass(frozen=True, slots=True)
class Clip:
    """What is said and how: speed in words a minute, pitch 0 to 100, noise in dB below the speech, gain as a factor."""

    text: str
    voice: str
    rate_wpm: int
    pitch: int
    snr_db: float
    gain: float


def sentences() -> list[str]:
    """All sentences of the grammar, such as `take the red box upstairs`: 4 or 5 words, 22 different ones."""
    parts = itertools.product(VERBS, COLOURS, OBJECTS, PLACES)
    return [f"{verb} the {colour} {thing} {place}".strip() for verb, colour, thing, place in parts]


def synthesize(text: str, voice: str, rate_wpm: int, pitch: int) -> tuple[NDArray[np.float32], int]:
    """Speak one text with espeak-ng; the arguments are those of `Engine.say`.

    Returns:
        samples in [-1, 1], `[T]`, and their number a second. The same arguments give the same samples.
    """
    engine = Engine()
    return engine.say(text, voice, rate_wpm, pitch), engine.rate


def make_speech(folder: str | Path, seed: int = 0, train: int = 800, validation: int = 60, test: int = 120) -> None:
    """Write `train.jsonl`, `validation.jsonl` and `test.jsonl` with their audio beside them (16-bit WAV).

    No sentence is in two of the three; half of the test is spoken by a voice that is in neither of the others. The
    same arguments give the same files.

    Args:
        folder: where the files go; made if need be.
        seed: fixes the sentences, the voices and the noise.
        train: number of clips to train on.
        validation: number of clips for evaluation during training, each another sentence.
        test: number of clips for the last evaluation, each another sentence.
    """
    rng, engine = np.random.default_rng(seed), Engine()
    shuffled = [str(text) for text in rng.permutation(sentences())]
    held_out = validation + test
    plans = {
        "test": _plan(rng, shuffled[:test], test, (*VOICES, *[UNHEARD_VOICE] * len(VOICES))),
        "validation": _plan(rng, shuffled[test:held_out], validation, VOICES),
        "train": _plan(rng, shuffled[held_out:], train, VOICES),
    }
    for name, clips in plans.items():
        _write_split(Path(folder), name, clips, engine, rng)


def _plan(rng: np.random.Generator, texts: Sequence[str], count: int, voices: Sequence[str]) -> list[Clip]:
    return [
        Clip(
            text=text,
            voice=voices[int(rng.integers(len(voices)))],
            rate_wpm=int(rng.integers(170, 231)),
            pitch=int(rng.integers(35, 66)),
            snr_db=float(rng.uniform(10, 30)),
            gain=float(rng.uniform(0.3, 1.0)),
        )
        for text in itertools.islice(itertools.cycle(texts), count)
    ]


def _write_split(folder: Path, name: str, clips: Iterable[Clip], engine: Engine, rng: np.random.Generator) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for number, clip in enumerate(clips):
        samples = _record(clip, engine, rng)
        audio = f"{name}/{number:05d}.wav"
        _write_wav(folder / audio, samples, engine.rate)
        duration = round(len(samples) / engine.rate, 4)
        rows.append({"audio": audio, "text": clip.text, "language": "en", "duration": duration, "speaker": clip.voice})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _record(clip: Clip, engine: Engine, rng: np.random.Generator) -> NDArray[np.float32]:
    speech = engine.say(clip.text, clip.voice, clip.rate_wpm, clip.pitch)
    level = np.sqrt(np.mean(speech**2)) * 10 ** (-clip.snr_db / 20)
    noisy = clip.gain * (speech + level * rng.standard_normal(len(speech), dtype=np.float32))
    return np.asarray(np.clip(noisy, -1, 1), dtype=np.float32)


def _write_wav(path: Path, samples: NDArray[np.float32], rate: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
