"""The data path of encoder-decoder models: from manifests to input and tokens. Runs in the data workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....common.data.processing import Shown
from ....common.errors import BadExample, ModelError
from ..audio import Wave
from ..extractor import Extractor, batch
from ..features import draw
from ..processing import IGNORED, GeneratingProcessing
from ..utterance import Utterance
from .config import Config
from .model import load_config, load_processor, moonshine_frames, setting


@dataclass(frozen=True)
class Encoded:
    """One utterance as model input.

    Args:
        features: [F, T].
        prompt: start token and control tokens.
        text: tokens of the transcript and the end token; () where it carries no loss.
        utterance: what was encoded.
    """

    features: Tensor
    prompt: tuple[int, ...]
    text: tuple[int, ...]
    utterance: Utterance


class Seq2SeqProcessing(GeneratingProcessing):
    """What an encoder-decoder model does with utterances.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model or adapter, whose tokenizer and feature settings are used.
    """

    def __init__(self, recipe: Config, weights: Path | None = None):
        self.recipe = recipe
        start, path = recipe.model.path, recipe.model.path if weights is None else str(weights)
        self.processor = load_processor(path)
        self.hearing, self.tokenizer = Extractor(self.processor.feature_extractor), self.processor.tokenizer
        self.config = load_config(start if recipe.model.lora else path)
        super().__init__(recipe.data, self.hearing.rate)
        if self.hearing.raw and (self.cache is not None or self.augment.changes_features):
            raise ModelError(
                "the model hears samples, so that there are no features to keep or to mask",
                where="data.cache" if self.cache is not None else "data.augment",
                given=recipe.model.path,
            )
        end = setting(self.config, "eos_token_id")
        self.end = int(end[0] if isinstance(end, list) else end)
        self.start = int(setting(self.config, "decoder_start_token_id", "bos_token_id"))
        self.most = int(setting(self.config, "max_target_positions", "max_position_embeddings") or 1 << 30)

    @property
    def settings(self) -> str:
        return self.hearing.settings

    def features(self, wave: Wave) -> Tensor:
        return self.hearing(wave)

    # ------------------------------------------------------------------ text

    def language(self, utterance: Utterance) -> str | None:
        return utterance.language or self.recipe.task.language

    def prompt(self, utterance: Utterance) -> tuple[int, ...]:
        """Start token and control tokens.

        Raises:
            BadExample: `unknown_language`: the vocabulary has no such token, or the row has no language.
        """
        found, language = [self.start], self.language(utterance)
        for name in self.recipe.task.prompt:
            token = name.replace("{language}", language or "")
            number = self.tokenizer.convert_tokens_to_ids(token)
            if number is None or number == self.tokenizer.unk_token_id or ("{language}" in name and not language):
                raise BadExample(
                    "unknown_language" if "{language}" in name else "unknown_control_token",
                    "the model has no such control token", where=utterance.where, given=token,
                )  # fmt: skip
            found.append(int(number))
        return tuple(found)

    def text(self, utterance: Utterance) -> tuple[int, ...]:
        """Tokens of the transcript, and the end token."""
        said = " ".join(utterance.text.split())
        said = said.lower() if self.recipe.task.lowercase else said
        return (*self.tokenizer(said, add_special_tokens=False).input_ids, self.end)

    def unknown(self, utterance: Utterance) -> int:
        mark = self.tokenizer.unk_token_id
        return 0 if mark is None else self.text(utterance).count(mark)

    def check(self, utterance: Utterance, training: bool) -> None:
        prompt = self.prompt(utterance)
        if self.config.model_type == "moonshine" and moonshine_frames(self.shortest(utterance)) < 1:
            problem, given = "the encoder needs more audio", f"{utterance.duration:.3f} s"
            raise BadExample("too_short", problem, where=utterance.where, given=given)
        if not training:  # a text that can't be trained on is still a reference
            return
        text = self.text(utterance)
        if len(text) == 1:
            problem = "no token is left of the text"
            raise BadExample("no_tokens", problem, where=utterance.where, given=repr(utterance.text))
        if self.recipe.task.unknown == "refuse" and self.unknown(utterance):
            raise BadExample(
                "unknown_tokens", "the text has what the vocabulary lacks", where=utterance.where,
                given=utterance.text, do="correct the row, or train its unknown token (`task.unknown: keep`)",
            )  # fmt: skip
        if len(prompt) + len(text) - 1 > self.most:
            tokens = len(prompt) + len(text) - 1
            problem = "the text has more tokens than the decoder"
            raise BadExample("text_too_long", problem, where=utterance.where, given=tokens, expected=self.most)

    def notes(self, example: Utterance) -> Mapping[str, int]:
        unknown = self.unknown(example)
        return {"unknown tokens": unknown} if unknown else {}

    # ------------------------------------------------------------------ encoding

    def encode(self, example: Utterance, generator: np.random.Generator | None) -> Encoded:
        features = self.hear(example, generator).features
        if generator is not None:
            features = self.augment.features(features, generator)
        prompt, text = self.prompt(example), self.text(example)
        # What is said in a piece of a longer recording isn't known.
        known = example.whole is None and len(text) > 1 and len(prompt) + len(text) - 1 <= self.most
        return Encoded(features, prompt, text if known else (), example)

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """A batch.

        Returns:
            features, lengths: padded inputs, samples [B, N] or features [B, T, F], and their lengths [B].
            input_ids: decoder input [B, L], padded with the end token.
            labels: what is asked [B, L], -100 elsewhere.
            prompts: start and control tokens [B, P].
            utterances: list of the utterances.
        """
        features, lengths = batch([item.features for item in encoded], self.hearing.raw)
        width = max(len(item.prompt) + max(len(item.text), 1) - 1 for item in encoded)
        inputs = torch.full((len(encoded), width), self.end)
        labels = torch.full((len(encoded), width), IGNORED)
        for row, item in enumerate(encoded):
            given, before = [*item.prompt, *item.text[:-1]], len(item.prompt) - 1
            inputs[row, : len(given)] = torch.tensor(given)
            labels[row, before : before + len(item.text)] = torch.tensor(item.text, dtype=torch.long)
        return {
            "features": features,
            "lengths": lengths,
            "input_ids": inputs,
            "labels": labels,
            "prompts": torch.tensor([item.prompt for item in encoded]),
            "utterances": [item.utterance for item in encoded],
        }

    def show(self, data: dict[str, Any], row: int) -> Shown:
        utterance, real, heard = data["utterances"][row], int(data["lengths"][row]), data["features"][row]
        labels = [label for label in data["labels"][row].tolist() if label != IGNORED]
        read = [(token, False) for token in data["prompts"][row].tolist()] + [(token, True) for token in labels]
        facts = {
            "audio": f"{utterance.duration:.2f} s",
            "input": f"{real} of {heard.shape[0]} {'samples' if self.hearing.raw else 'frames'}",
            "language": str(self.language(utterance)),
            "text": utterance.text,
        }
        tokens = [(self.tokenizer.decode([token]), carries) for token, carries in read]
        return Shown(utterance.where, facts, tokens, "" if self.hearing.raw else draw(heard[:real].T))
