"""The data path that every speech recogniser shares: from manifests to features. Runs in the data workers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import file_digest, sha256
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from ...common.data.processing import Processing
from ...common.errors import BadExample, DataError, LuthierError
from ...common.pages.media import encoded, grey
from ...common.recipe import Source
from . import audio, cache, manifest
from .audio import Wave
from .augment import Augment
from .config import SpeechData
from .long.cut import Voices
from .text import normalize, words
from .utterance import Utterance

IGNORED = -100
"""Label of a token that carries no loss."""


@dataclass(frozen=True)
class Heard:
    """An utterance's audio as a model hears it.

    Args:
        features: [F, T] of the real audio, before any masks.
        key: content key in the cache, None without one.
        stretch: its length over that of the recording; not 1 where the speed was varied.
    """

    features: Tensor
    key: str | None
    stretch: float


class SpeechProcessing(Processing[Utterance]):
    """Utterances are read, checked, varied and turned into features, which are kept on disk where asked.

    A subclass says what features are (`features`, `settings`), what else makes an utterance unusable (`check`), and
    makes batches.

    Args:
        section: `data` of the recipe.
        rate: samples a second that the model hears.
        max_samples: most that it takes; None: any.
    """

    unit: ClassVar[str] = "seconds"

    def __init__(self, section: SpeechData, rate: int, max_samples: int | None = None):
        self.rate, self.max_samples = rate, max_samples
        self.augment = Augment(section.augment, rate)
        self.fastest = max([1.0, *section.augment.speed])
        longest = section.audio.max_seconds if max_samples is None else max_samples / rate
        self.audio = section.audio.model_copy(update={"max_seconds": min(section.audio.max_seconds, longest)})
        self.voices = Voices(self.audio, rate) if self.audio.voice is not None else None
        folder, most = section.cache.folder, int(section.cache.max_gb * 1e9)
        self.cache = cache.FeatureCache(folder, most) if folder else None

    # ------------------------------------------------------------------ what a model defines

    @property
    @abstractmethod
    def settings(self) -> str:
        """All that decides the features besides the audio: part of the cache's key."""

    @abstractmethod
    def features(self, wave: Wave) -> Tensor:
        """Features [F, T] of samples [N] within -1 and 1; the same for the same samples."""

    @abstractmethod
    def check(self, utterance: Utterance, training: bool) -> None:
        """Raise BadExample where the utterance can't be trained on, or (`training` false) not be evaluated."""

    # ------------------------------------------------------------------ examples

    def read(self, source: Source) -> Iterator[Utterance | BadExample]:
        return manifest.utterances(source.path, source.split, source.label)

    def examine(self, example: Utterance, training: bool) -> list[Utterance]:
        if self.voices is not None and not training:
            pieces = self.voices.pieces(example)
        else:
            pieces = audio.examine(example, self.audio, self.rate)
        for piece in pieces:
            self.check(piece, training)
        return pieces

    def contents(self, example: Utterance) -> Iterable[Hashable]:
        """The bytes of the file, and which stretch of them."""
        stored = _digest(example.audio) if isinstance(example.audio, str) else sha256(example.audio()).hexdigest()
        return ((stored, example.start, example.end, example.channel),)

    def units(self, example: Utterance) -> Sequence[Hashable]:
        return words(normalize(example.text, example.language), example.language)

    def beside(self, data: Any, row: int) -> Mapping[str, bytes | str]:
        """The audio at the rate that the model hears, its features before any augmentation, and the text as it is
        scored."""
        utterance: Utterance = data["utterances"][row]
        wave = audio.read(utterance, self.rate, self.audio.channel)
        found: dict[str, bytes | str] = {
            "text as it is scored": normalize(utterance.text, utterance.language),
            "audio.flac": encoded(wave, self.rate),
        }
        features = self.features(wave)
        if features.dim() == 2 and min(features.shape) > 1:  # else they are the samples themselves
            found["features.png"] = grey(features.numpy())
        return found

    def doubts(self, examples: Sequence[Utterance]) -> Iterable[LuthierError]:
        texts = {example.text for example in examples}
        if len(examples) > 1 and len(texts) == 1:
            yield DataError(
                "every recording has the same text",
                where="data.train",
                given=f"{texts.pop()!r} {len(examples)} times",
                do="see that the column of the text is the right one",
            )

    def cost(self, example: Utterance) -> float:
        return example.duration or 0.0

    def shortest(self, utterance: Utterance) -> int:
        """Samples of the utterance at the fastest speed of the augmentation."""
        return int((utterance.duration or 0.0) / self.fastest * self.rate)

    # ------------------------------------------------------------------ features

    def hear(self, example: Utterance, generator: np.random.Generator | None) -> Heard:
        """The features of an utterance, from the cache if there is one; `generator` varies the audio."""
        if self.cache is not None:
            features, key = self._cached(example, self.cache)
            return Heard(features, key, 1.0)
        wave = audio.read(example, self.rate, self.audio.channel)
        heard = wave if generator is None else self.vary(wave, generator)
        return Heard(self.features(heard), None, len(heard) / len(wave))

    def vary(self, wave: Wave, generator: np.random.Generator) -> Wave:
        """The training's random changes of the audio."""
        return self.augment.wave(wave, generator, self.max_samples)

    def _cached(self, example: Utterance, folder: cache.FeatureCache) -> tuple[Tensor, str]:
        """Features in the precision of the cache, whether they come from it or are new, so that a resumed run, which
        finds more there, computes the same."""
        key = cache.key(example, f"{self.settings} channel={self.audio.channel}")
        found = folder.get(key)
        if found is None:
            found = self.features(audio.read(example, self.rate, self.audio.channel)).half()
            folder.put(key, found)
        return found.float(), key


@lru_cache(maxsize=1024)  # utterances of one long recording follow each other
def _digest(path: str) -> str:
    with open(path, "rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def frames_for_ctc(ids: Sequence[Any]) -> int:
    """CTC needs a frame for each token and one more between equal neighbours (Graves et al., ICML 2006)."""
    return len(ids) + sum(bool(a == b) for a, b in pairwise(ids))


def check_alignable(utterance: Utterance, ids: Sequence[Any], frames: int) -> None:
    """Refuse an utterance that CTC can't align with its tokens.

    Args:
        utterance: named in the error.
        ids: tokens of its text.
        frames: of the model's output for it.

    Raises:
        BadExample: there are fewer.
    """
    needed = frames_for_ctc(ids)
    if frames < needed:
        raise BadExample(
            "too_short_for_ctc",
            "the audio has fewer frames than its text needs for CTC",
            where=utterance.where,
            given=f"{frames} frames",
            expected=f"at least {needed}",
        )


class GeneratingProcessing(SpeechProcessing):
    """The data path of a recogniser that writes its transcripts. Its batches have `labels` and `utterances`."""

    processor: Any
    """transformers' processor of the model, with its tokenizer and feature extractor."""

    @abstractmethod
    def language(self, utterance: Utterance) -> str | None:
        """The language that is asked for; None where the model is not told one."""
