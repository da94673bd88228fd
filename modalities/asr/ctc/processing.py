"""The data path of CTC models: from manifests to samples or features, and labels. Runs in the data workers."""

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
from ..audio import Wave, read
from ..extractor import batch
from ..features import draw
from ..processing import SpeechProcessing, check_alignable
from ..utterance import Utterance
from .config import Config
from .hearing import Hearing, Piece
from .model import load_config
from .spelling import Labels
from .vocabulary import vocabulary


@dataclass(frozen=True)
class Encoded:
    """One utterance as model input.

    Args:
        pieces: what is run through the model, one after the other; one, but for streaming.
        features: [F, T] of each piece.
        labels: of the transcript; () where it can't carry loss.
        utterance: what was encoded.
    """

    pieces: tuple[Piece, ...]
    features: tuple[Tensor, ...]
    labels: tuple[int, ...]
    utterance: Utterance


class CtcProcessing(SpeechProcessing):
    """What a CTC model does with utterances.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model or adapter, whose vocabulary and feature settings are used.
    """

    def __init__(self, recipe: Config, weights: Path | None = None):
        self.recipe = recipe
        start, path = recipe.model.path, recipe.model.path if weights is None else str(weights)
        self.vocabulary = vocabulary(recipe, weights)
        self.labels = Labels(self.vocabulary.tokenizer, recipe.task)
        self.hearing = Hearing(path, load_config(start if recipe.model.lora else path))
        super().__init__(recipe.data, self.hearing.rate)
        if self.hearing.raw and (self.cache is not None or self.augment.changes_features):
            raise ModelError(
                "the model hears samples, so that there are no features to keep or to mask",
                where="data.cache" if self.cache is not None else "data.augment",
                given=recipe.model.path,
                do="take data.cache out; for masks, set model.mask",
            )

    @property
    def settings(self) -> str:
        return self.hearing.settings

    def features(self, wave: Wave) -> Tensor:
        return self.hearing(wave)

    def check(self, utterance: Utterance, training: bool) -> None:
        if training:
            ids = self.labels.ids(utterance.text, utterance.where)
            check_alignable(utterance, ids, self.hearing.frames(self.shortest(utterance)))

    def notes(self, example: Utterance) -> Mapping[str, int]:
        unknown = self.labels.unknown(example.text)
        return {f"{char!r} not in the vocabulary": count for char, count in unknown.items()}

    # ------------------------------------------------------------------ encoding

    def encode(self, example: Utterance, generator: np.random.Generator | None) -> Encoded:
        if generator is None and self.recipe.evaluate.stream is not None:
            return self._in_pieces(example)
        features = self.hear(example, generator).features
        if generator is not None:
            features = self.augment.features(features, generator)
        return Encoded((Piece(0, -1),), (features,), self._labels(example, generator is not None), example)

    def _in_pieces(self, example: Utterance) -> Encoded:
        wave = read(example, self.rate, self.audio.channel)
        pieces = self.hearing.pieces(len(wave), self.recipe.evaluate.stream)
        features = [self.features(wave[piece.first : piece.last]) for piece in pieces]
        return Encoded(tuple(pieces), tuple(features), self._labels(example, False), example)

    def _labels(self, example: Utterance, training: bool) -> tuple[int, ...]:
        """Labels; () in an evaluation where they can't carry loss: the text is still a reference."""
        try:
            ids = self.labels.ids(example.text, example.where)
            if not training:
                check_alignable(example, ids, self.hearing.frames(int((example.duration or 0.0) * self.rate)))
        except BadExample:
            if training:
                raise
            return ()
        return ids

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """A batch.

        Returns:
            features, lengths: padded inputs of all pieces, samples [B, N] or features [B, T, F], and their lengths [B].
            labels, label_lengths: labels one after the other [N], and their number for each utterance.
            pieces: for each utterance its pieces.
            utterances: list of the utterances.
        """
        features, lengths = batch([one for item in encoded for one in item.features], self.hearing.raw)
        return {
            "features": features,
            "lengths": lengths,
            "labels": torch.tensor([label for item in encoded for label in item.labels], dtype=torch.long),
            "label_lengths": torch.tensor([len(item.labels) for item in encoded]),
            "pieces": [item.pieces for item in encoded],
            "utterances": [item.utterance for item in encoded],
        }

    def show(self, data: dict[str, Any], row: int) -> Shown:
        utterance, real = data["utterances"][row], int(data["lengths"][row])
        heard = data["features"][row]
        count = self.hearing.frames(int((utterance.duration or 0.0) * self.rate))
        first = int(data["label_lengths"][:row].sum())
        ids = data["labels"][first : first + int(data["label_lengths"][row])].tolist()
        unknown = self.labels.unknown(utterance.text)
        facts = {
            "audio": f"{utterance.duration:.2f} s",
            "input": f"{real} of {heard.shape[0]} {'samples' if self.hearing.raw else 'frames'}; {count} output frames",
            "text": utterance.text,
        }
        if unknown:
            facts["not in the vocabulary"] = ", ".join(f"{char!r} {count} times" for char, count in unknown.items())
        tokens = [(self.vocabulary.tokens[label], True) for label in ids]
        return Shown(utterance.where, facts, tokens, "" if self.hearing.raw else draw(heard[:real].T))
