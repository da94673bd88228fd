"""Whisper's data path: from manifests to mel features and decoder tokens. Runs in the data workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....common.data.processing import Shown
from ....common.errors import BadExample
from ..audio import Wave
from ..features import LogMel, draw
from ..processing import SpeechProcessing, check_alignable
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


class WhisperProcessing(SpeechProcessing):
    """What Whisper does with utterances.

    Args:
        recipe: the resolved recipe.
        path: model directory; its tokenizer, feature and generation settings are used.
    """

    def __init__(self, recipe: Config, path: str):
        from transformers import AutoConfig

        self.recipe = recipe
        self.processor = load_processor(path)
        self.mel = LogMel.from_extractor(self.processor.feature_extractor)
        super().__init__(recipe.data, self.mel.rate, self.mel.max_samples)
        self.generation = load_generation_config(path)
        config = AutoConfig.from_pretrained(recipe.model.path if recipe.model.lora else path)  # an adapter has none
        self.targets = Targets(self.processor.tokenizer, self.generation, recipe.task, config.max_target_positions)

    @property
    def settings(self) -> str:
        return self.mel.settings

    def features(self, wave: Wave) -> Tensor:
        return self.mel(wave)

    def check(self, utterance: Utterance, training: bool) -> None:
        if not training:  # a text that can't be trained on is still a reference
            self.targets.control(utterance)
            return
        target = self.targets.target(utterance)
        if self.recipe.task.ctc_weight:
            frames = self.shortest(utterance) // self.mel.hop // FRAMES_PER_POSITION
            check_alignable(utterance, target.text[:-1], frames)

    # ------------------------------------------------------------------ encoding

    def encode(self, example: Utterance, generator: np.random.Generator | None) -> Encoded:
        heard = self.hear(example, generator)
        mel, fill = heard.features, self.mel.pad_value(heard.features)
        if generator is not None:
            mel = self.augment.features(mel, generator)
        return Encoded(mel, fill, self._target(example, generator is not None, heard.stretch), example, heard.key)

    def _target(self, example: Utterance, training: bool, stretch: float) -> Target:
        if example.whole is not None:  # what is said in a piece of it isn't known
            return self.targets.unasked(example)
        try:
            return self.targets.target(example, stretch)
        except BadExample:
            if training:
                raise
            return self.targets.unasked(example)

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
