"""Whisper's data path: from manifests to mel features and decoder tokens. Runs in the data workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....common.data.processing import Processing, Shown
from ....common.errors import BadExample
from ....common.recipe import Source
from .. import audio, cache, manifest
from ..augment import Augment
from ..features import LogMel, draw
from ..utterance import Utterance
from .config import Config
from .model import FRAMES_PER_POSITION, load_generation_config, load_processor
from .tokens import Target, Targets


@dataclass(frozen=True)
class Encoded:
    """One utterance as model input.

    Args:
        mel: log-mel features [F, T] of the real audio.
        fill: value of the frames after it.
        target: decoder tokens.
        utterance: what was encoded.
        key: content key of the audio, where the encoder's output is cached.
    """

    mel: Tensor
    fill: float
    target: Target
    utterance: Utterance
    key: str | None


class WhisperProcessing(Processing[Utterance]):
    """What Whisper does with utterances.

    Args:
        recipe: the resolved recipe.
        path: model directory; its tokenizer, feature and generation settings are used.
    """

    unit = "seconds"

    def __init__(self, recipe: Config, path: str):
        from transformers import AutoConfig

        self.recipe = recipe
        self.processor = load_processor(path)
        self.generation = load_generation_config(path)
        config = AutoConfig.from_pretrained(recipe.model.path if recipe.model.lora else path)  # an adapter has none
        self.targets = Targets(self.processor.tokenizer, self.generation, recipe.task, config.max_target_positions)
        self.mel = LogMel.from_extractor(self.processor.feature_extractor)
        self.augment = Augment(recipe.data.augment, self.mel.rate)
        longest = min(recipe.data.audio.max_seconds, self.mel.max_samples / self.mel.rate)
        self.audio = recipe.data.audio.model_copy(update={"max_seconds": longest})
        settings = recipe.data.cache
        self.cache = cache.FeatureCache(settings.folder, int(settings.max_gb * 1e9)) if settings.folder else None

    # ------------------------------------------------------------------ examples

    def read(self, source: Source) -> Iterator[Utterance | BadExample]:
        return manifest.utterances(source.path, source.split, source.label)

    def examine(self, example: Utterance, training: bool) -> list[Utterance]:
        pieces = audio.examine(example, self.audio, self.mel.rate)
        for piece in pieces:
            if not training:  # a text that can't be trained on is still a reference
                self.targets.control(piece)
                continue
            target = self.targets.target(piece)
            if self.recipe.task.ctc_weight:
                self._check_alignable(piece, target)
        return pieces

    def _check_alignable(self, utterance: Utterance, target: Target) -> None:
        """CTC needs a frame for each token and one more between equal neighbours, at the fastest speed too."""
        ids = target.text[:-1]
        needed = len(ids) + sum(a == b for a, b in pairwise(ids))
        shortest = (utterance.duration or 0.0) / max([1.0, *self.recipe.data.augment.speed])
        present = int(shortest * self.mel.rate) // self.mel.hop // FRAMES_PER_POSITION
        if present < needed:
            raise BadExample(
                "too_short_for_ctc",
                "the audio has fewer frames than its text needs for CTC",
                where=utterance.where,
                given=f"{present} frames",
                expected=f"at least {needed}",
            )

    def cost(self, example: Utterance) -> float:
        return example.duration or 0.0

    # ------------------------------------------------------------------ encoding

    def encode(self, example: Utterance, generator: np.random.Generator | None) -> Encoded:
        if self.cache is not None:
            mel, key = self._cached(example)
            stretch = 1.0
        else:
            wave = audio.read(example, self.mel.rate, self.audio.channel)
            heard = wave if generator is None else self.augment.wave(wave, generator, self.mel.max_samples)
            mel, key, stretch = self.mel(heard), None, len(heard) / len(wave)
        fill = self.mel.pad_value(mel)
        if generator is not None:
            mel = self.augment.features(mel, generator)
        return Encoded(mel, fill, self._target(example, generator is not None, stretch), example, key)

    def _target(self, example: Utterance, training: bool, stretch: float) -> Target:
        try:
            return self.targets.target(example, stretch)
        except BadExample:
            if training:
                raise
            return self.targets.unasked(example)

    def _cached(self, example: Utterance) -> tuple[Tensor, str]:
        """Features in the precision of the cache, whether they come from it or are new, so that a resumed run, which
        finds more there, computes the same."""
        assert self.cache is not None
        key = cache.key(example, f"{self.mel.settings} channel={self.audio.channel}")
        found = self.cache.get(key)
        if found is None:
            found = self.mel(audio.read(example, self.mel.rate, self.audio.channel)).half()
            self.cache.put(key, found)
        return found.float(), key

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """A batch.

        Returns:
            features: mel [B, F, T], padded to the batch's context.
            input_ids: decoder input [B, L], padded with the end token.
            labels: what is asked [B, L], -100 elsewhere.
            ctc_labels, ctc_lengths: text tokens [N] one after the other and their number [B], for the CTC loss.
            frames: mel frames of real audio [B].
            utterances, prefixes, keys: lists of the utterances, decoder prompts and cache keys.
        """
        frames = self.frames(encoded, generator)
        width = max(len(item.target.inputs) for item in encoded)
        inputs = torch.full((len(encoded), width), self.targets.end)
        labels = torch.full((len(encoded), width), -100)
        for row, item in enumerate(encoded):
            length = len(item.target.inputs)
            inputs[row, :length] = torch.tensor(item.target.inputs)
            labels[row, :length] = torch.tensor(item.target.labels)
        return {
            "features": self.mel.pad([item.mel for item in encoded], frames, [item.fill for item in encoded]),
            "input_ids": inputs,
            "labels": labels,
            "ctc_labels": torch.tensor([token for item in encoded for token in item.target.text[:-1]]),
            "ctc_lengths": torch.tensor([len(item.target.text) - 1 for item in encoded]),
            "frames": torch.tensor([item.mel.shape[1] for item in encoded]),
            "utterances": [item.utterance for item in encoded],
            "prefixes": [(*item.target.prompt, *item.target.control) for item in encoded],
            "keys": [item.key for item in encoded],
        }

    def show(self, data: dict[str, Any], row: int) -> Shown:
        utterance, mel = data["utterances"][row], data["features"][row]
        real, seconds = int(data["frames"][row]), self.mel.hop / self.mel.rate
        length = len(data["prefixes"][row]) + int(data["ctc_lengths"][row])
        inputs, labels = data["input_ids"][row][:length].tolist(), data["labels"][row][:length].tolist()
        asked = [label if label != -100 else None for label in labels]
        following = zip([*inputs[1:], self.targets.end], asked, strict=True)
        read = [(inputs[0], False)] + [(token, label == token) for token, label in following]
        facts = {
            "audio": f"{utterance.duration:.2f} s",
            "context": f"{mel.shape[1] * seconds:.2f} s; {real} of {mel.shape[1]} frames",
            "language": str(self.targets.language(utterance)),
            "text": utterance.text,
        }
        tokens = [(self.processor.tokenizer.decode([token]), carries) for token, carries in read]
        return Shown(utterance.where, facts, tokens, draw(mel))

    def frames(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> int:
        """Mel frames that a batch is padded to: all, what it needs, or (a share of the training batches) in between."""
        section, full = self.recipe.model, self.mel.max_frames
        dynamic = section.audio_context if generator is not None else self.recipe.evaluate.audio_context
        if dynamic == "full":
            return full
        margin = int(section.context_margin * self.mel.rate / self.mel.hop)
        needed = min(full, max(item.mel.shape[1] for item in encoded) + margin)
        if generator is not None and generator.random() < section.long_context_share:
            needed = round(needed * (full / needed) ** generator.random())
        return min(full, -(-needed // FRAMES_PER_POSITION) * FRAMES_PER_POSITION)


def path_of(recipe: Config, weights: Path | None) -> str:
    """Where tokenizer and settings are read: the saved model if there is one, else the start model."""
    return recipe.model.path if weights is None else str(weights)
