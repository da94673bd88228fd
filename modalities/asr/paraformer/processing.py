"""Paraformer's data path: from manifests to features and token ids. Runs in the data workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ....common.data.processing import Shown
from ....common.errors import BadExample, RecipeError
from .. import manifest
from ..audio import Wave
from ..features import draw
from ..processing import SpeechProcessing, check_alignable, frames_for_ctc
from ..utterance import Utterance
from . import hotwords, sensevoice
from .config import Config
from .directory import Directory
from .frontend import Frontend
from .tokens import Tokens

IGNORED = -1
"""Padding of the token ids; 0 is a token (`<blank>`)."""


def _halved(frames: int) -> int:
    return max(0, (frames - 1) // 2)


def _kept(frames: int) -> int:
    return frames


# Encoder positions of a recording alone, by FunASR's `input_layer`; any other keeps all frames.
_POSITIONS: dict[str, Callable[[int], int]] = {
    "conv2d": lambda frames: _halved(_halved(frames)),
    "conv2dpad": lambda frames: _halved(_halved(frames)),
    "conv2d2": lambda frames: max(0, _halved(frames) - 2),
    "conv2d6": lambda frames: max(0, (_halved(frames) - 2) // 3),
    "conv2d8": lambda frames: _halved(_halved(_halved(frames))),
}


@dataclass(frozen=True)
class Encoded:
    """One utterance as model input.

    Args:
        features: [T, F].
        ids: token ids of its text, after those of its control tokens where the model has such.
        utterance: what was encoded.
    """

    features: Tensor
    ids: list[int]
    utterance: Utterance


class ParaformerProcessing(SpeechProcessing):
    """What Paraformer does with utterances.

    Args:
        recipe: the resolved recipe.
        directory: the model's files.
        extend: whether `model.new_tokens` are still to be added; not to the list of a saved model, which has them.
    """

    def __init__(self, recipe: Config, directory: Directory, extend: bool = True):
        self.recipe, self.directory = recipe, directory
        self.frontend = Frontend(directory)
        self.tokens = Tokens(directory, recipe)
        super().__init__(recipe.data, self.frontend.rate)
        if extend and recipe.model.new_tokens:
            if recipe.model.new_tokens == "train":
                self.tokens.learn(self._training_texts())
            else:
                self.tokens.extend(recipe.model.new_tokens)
        model = directory.model
        self.has_ctc = model.get("ctc_weight", 0.5) > 0
        self.closing = int(model.get("predictor_bias", 0))  # the end token, where the model writes it
        layer = (directory.config.get("encoder_conf") or {}).get("input_layer", "conv2d")
        self.positions = _POSITIONS.get(layer, _kept)
        self.tags: sensevoice.Tags | None = None
        if directory.config["model"] == sensevoice.NAME:
            self.tags = sensevoice.Tags(self.tokens, recipe.task.language)
            self.has_ctc, self.positions = False, _kept  # CTC is all it has: rows that are too short for it are bad
        self.contextual = directory.config["model"] == hotwords.NAME
        self.hotwords = self._hotwords(recipe.evaluate.hotwords)

    def _hotwords(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of the words that are listened for in an evaluation."""
        if words and not self.contextual:
            problem, given = "only a contextual Paraformer hears hotwords", self.directory.config["model"]
            raise RecipeError(problem, where="evaluate.hotwords", given=given, expected=hotwords.NAME)
        for word in words:
            if self.tokens.unknown(word) or not self.tokens.encode(word):
                raise RecipeError("the token list lacks it", where="evaluate.hotwords", given=word)
        return [self.tokens.encode(word) for word in words]

    def _training_texts(self) -> Iterator[str]:
        for source in self.recipe.data.train:
            for item in manifest.utterances(source.path, source.split, source.label):
                if isinstance(item, Utterance):
                    yield self.tokens.text(item)

    @property
    def settings(self) -> str:
        return self.frontend.settings

    def features(self, wave: Wave) -> Tensor:
        return self.frontend.energies(wave)

    def vary(self, wave: Wave, generator: np.random.Generator) -> Wave:
        heard, dither = super().vary(wave, generator), self.recipe.model.dither
        if not dither:
            return heard
        noise = generator.standard_normal(len(heard), np.float32)
        return heard + noise * np.float32(dither / 2**15)

    # ------------------------------------------------------------------ checks

    def check(self, utterance: Utterance, training: bool) -> None:
        positions = self.positions(self.frontend.frames(self.shortest(utterance)))
        if positions < 1:
            raise BadExample(
                "too_short", "the encoder needs more audio", where=utterance.where, given=f"{utterance.duration:.3f} s"
            )
        if not training:  # a text that can't be trained on is still a reference
            return
        text = self.tokens.text(utterance)
        unknown, ids = self.tokens.unknown(text), self.tokens.encode(text)
        if unknown and self.recipe.task.unknown == "refuse":
            raise BadExample(
                "unknown_tokens", "the text has what the token list lacks", where=utterance.where,
                given=" ".join(dict.fromkeys(unknown)), do="add it (`model.new_tokens`), or train it as <unk> "
                "(`task.unknown: keep`)",
            )  # fmt: skip
        if not ids:
            raise BadExample("no_tokens", "no token is left of the text", where=utterance.where, given=repr(text))
        if self.tags is not None:
            self.tags.encode(utterance)
            check_alignable(utterance, ids, positions)
        if positions < len(ids) + self.closing:  # each token takes a whole frame's weight
            raise BadExample(
                "too_short_for_its_text", "the audio has fewer frames than its text has tokens", where=utterance.where,
                given=f"{positions} frames", expected=f"at least {len(ids) + self.closing}",
            )  # fmt: skip

    def notes(self, example: Utterance) -> Mapping[str, int]:
        """Unknown tokens; and rows that have too few frames for CTC only: they teach the decoder all the same."""
        text = self.tokens.text(example)
        found = {"unknown tokens": len(self.tokens.unknown(text))}
        if self.has_ctc:
            positions = self.positions(self.frontend.frames(self.shortest(example)))
            short = frames_for_ctc(self.tokens.encode(text)) > positions
            found["rows without a CTC loss, too short for it"] = int(short)
        return {name: number for name, number in found.items() if number}

    # ------------------------------------------------------------------ encoding

    def encode(self, example: Utterance, generator: np.random.Generator | None) -> Encoded:
        energies = self.hear(example, generator).features
        if generator is not None:
            energies = self.augment.features(energies, generator)
        features = self.frontend.assemble(energies)
        # What is said in a piece of a longer recording isn't known.
        ids = self.tokens.encode(self.tokens.text(example)) if example.whole is None else []
        if ids and self.tags is not None:
            ids = self._tagged(example, ids, len(features))
        return Encoded(features, ids, example)

    def _tagged(self, example: Utterance, ids: list[int], positions: int) -> list[int]:
        """Control tokens and text; empty where that has no loss, in an evaluation."""
        assert self.tags is not None
        try:
            check_alignable(example, ids, positions)
            return [*self.tags.encode(example), *ids]
        except BadExample:
            return []

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """A batch.

        Returns:
            speech: features [B, T, F], padded with 0.
            speech_lengths: frames of real audio [B].
            text: token ids [B, L], padded with -1.
            text_lengths: their number [B].
            tokens: their number over the batch, as a number.
            utterances: list of the utterances.
            hotword_pad, hotword_lengths: of a contextual Paraformer, see `hotwords.batch`.
        """
        words: Sequence[Sequence[int]] = self.hotwords
        if generator is not None and self.contextual:
            words = [word for item in encoded for word in hotwords.drawn(item.ids, generator)]
        ids = [torch.tensor(item.ids, dtype=torch.long) for item in encoded]
        return {
            "speech": pad_sequence([item.features for item in encoded], batch_first=True),
            "speech_lengths": torch.tensor([len(item.features) for item in encoded]),
            "text": pad_sequence(ids, batch_first=True, padding_value=IGNORED),
            "text_lengths": torch.tensor([len(item.ids) for item in encoded]),
            "tokens": sum(len(item.ids) for item in encoded),
            "utterances": [item.utterance for item in encoded],
            **(hotwords.batch(words) if self.contextual else {}),
        }

    def show(self, data: dict[str, Any], row: int) -> Shown:
        utterance, real = data["utterances"][row], int(data["speech_lengths"][row])
        ids = data["text"][row][: int(data["text_lengths"][row])].tolist()
        facts = {
            "audio": f"{utterance.duration:.2f} s",
            "frames": f"{real} of {data['speech'].shape[1]}, {1000 * self.frontend.seconds:g} ms each",
            "text": utterance.text,
        }
        tokens = [(token, True) for token in self.tokens.written(ids)]
        middle = self.frontend.bins * ((self.frontend.stacked - 1) // 2)  # of the frames that stand side by side
        picture = data["speech"][row, :real, middle : middle + self.frontend.bins].T
        return Shown(utterance.where, facts, tokens, draw(picture))
