"""NeMo's data path: from manifests to features of the model's own preprocessor, and tokens. Runs in data workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....common.data.processing import Shown
from ....common.errors import BadExample, ModelError, RecipeError
from ..audio import Wave
from ..features import draw
from ..processing import SpeechProcessing, check_alignable
from ..utterance import Utterance
from .config import Config
from .files import read, resolved
from .frames import encoded_frames
from .prompts import Prompts
from .vocabulary import Characters, Pieces, Tokens, characters, own_tokens, piece_folder, piece_section, pieces_of

_SYMBOLS = 10
"""NeMo's default for the most tokens that a transducer writes at one frame."""
_PLACES = 512
"""NeMo's default for the most tokens that an attention decoder reads."""


@dataclass(frozen=True)
class Encoded:
    """One utterance as model input.

    Args:
        features: [F, T] of the real audio.
        tokens: of its text; None if it can't be trained on, in an evaluation.
        utterance: what was encoded.
        prompt: tokens before the text, of models that take a prompt.
    """

    features: Tensor
    tokens: list[int] | None
    utterance: Utterance
    prompt: tuple[int, ...] = ()


class NemoProcessing(SpeechProcessing):
    """What NeMo's models do with utterances.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model, which has its own vocabulary.
    """

    def __init__(self, recipe: Config, weights: Path | None = None):
        self.recipe = recipe
        whole = weights is not None and recipe.model.lora is None
        self.origin = read(str(weights) if whole else recipe.model.path, {} if whole else dict(recipe.model.config))
        config = self.origin.config
        self._section = resolved(config.preprocessor)
        self.preprocessor = _preprocessor(self._section)
        self.featurizer: Any = getattr(self.preprocessor, "featurizer", None)
        super().__init__(recipe.data, int(self._section.get("sample_rate", config.get("sample_rate", 16000))))
        self.pad_to, self.pad_value = getattr(self.featurizer, "pad_to", 0), getattr(self.featurizer, "pad_value", 0.0)
        if self.featurizer is not None:
            self.featurizer.pad_to = 0  # the batch is padded, not the example
        out, frames = self._compute(np.zeros(self.rate, np.float32))
        self.tail = out.shape[1] - frames  # NeMo's batches are this much longer than their longest example
        self.piece_folder: TemporaryDirectory[str] | None = None
        self.own: Tokens | None = None
        self.tokens = self._vocabulary("model" if whole else recipe.model.vocabulary)
        self.encoded_frames = encoded_frames(config.encoder)
        self.prompts = self._prompts()

    def _vocabulary(self, kind: str) -> Tokens:
        if kind == "model" or self.origin.has_weights:
            self.own = own_tokens(self.origin)
        if kind == "model":
            assert self.own is not None
            return self.own
        if (kind == "data") == self.origin.has_pieces:
            subwords = "subwords" if self.origin.has_pieces else "characters"
            raise ModelError(
                f"a model of NeMo's class {self.origin.name} writes {subwords}",
                where="model.vocabulary",
                given=kind,
                expected="the path of a SentencePiece model" if self.origin.has_pieces else "model or data",
            )
        if kind == "data":
            return Characters(characters(self._texts()))
        self.piece_folder = piece_folder(kind)
        return pieces_of(piece_section(self.piece_folder.name, self.origin.is_aed))

    def _prompts(self) -> Prompts | None:
        given = dict(self.recipe.task.prompt)
        if self.origin.is_aed:
            assert isinstance(self.tokens, Pieces)
            return Prompts(self.origin.config, self.tokens.tokenizer, given)
        if given:
            raise RecipeError("the model takes no prompt", where="task.prompt", given=self.origin.name)
        return None

    def _texts(self) -> Iterator[str]:
        for source in self.recipe.data.train:
            for item in self.read(source):
                if not isinstance(item, BadExample):
                    yield self.text(item)

    # ------------------------------------------------------------------ features

    @property
    def settings(self) -> str:
        from nemo import __version__
        from omegaconf import OmegaConf

        section: Any = OmegaConf.to_container(self._section)
        return f"nemo {__version__} {sorted((str(key), repr(value)) for key, value in section.items())}"

    def features(self, wave: Wave) -> Tensor:
        out, frames = self._compute(wave)
        return out[:, :frames]

    @torch.no_grad()
    def _compute(self, wave: Wave) -> tuple[Tensor, int]:
        """NeMo's features of one example, with what it adds at the end, and how many of them are real."""
        signal = torch.from_numpy(np.ascontiguousarray(wave))[None]
        out, frames = self.preprocessor(input_signal=signal, length=torch.tensor([signal.shape[1]]))
        return out[0], int(frames)

    def vary(self, wave: Wave, generator: np.random.Generator) -> Wave:
        """Also dither, which NeMo adds in training only."""
        varied, dither = super().vary(wave, generator), getattr(self.featurizer, "dither", 0.0)
        if not dither:
            return varied
        return varied + np.float32(dither) * generator.standard_normal(len(varied), dtype=np.float32)

    def frames(self, samples: int) -> int:
        """Feature frames of so many samples."""
        if hasattr(self.featurizer, "get_seq_len"):
            return int(self.featurizer.get_seq_len(torch.tensor(samples)))
        return samples // int(self.preprocessor.hop_length)

    # ------------------------------------------------------------------ text

    def text(self, utterance: Utterance) -> str:
        """What is written in tokens."""
        return utterance.text.lower() if self.recipe.task.lowercase else utterance.text

    def language(self, utterance: Utterance) -> str | None:
        """The language of the text."""
        spoken = utterance.language or self.recipe.task.language
        return spoken if self.prompts is None else self.prompts.target(self.prompts.values(utterance, spoken))

    def prompt(self, utterance: Utterance) -> tuple[int, ...]:
        """Tokens before the text; () of models that take no prompt.

        Raises:
            BadExample: the model has no such prompt.
        """
        if self.prompts is None:
            return ()
        return self.prompts.encode(utterance, utterance.language or self.recipe.task.language)

    def target(self, utterance: Utterance) -> list[int]:
        """Tokens of the text.

        Raises:
            BadExample: it holds characters that the vocabulary lacks, or nothing else.
        """
        text, language = self.text(utterance), self.language(utterance)
        unknown = self.tokens.unknown(text, language)
        if unknown and self.recipe.task.unknown == "refuse":
            raise BadExample(
                "unknown_characters",
                "the text has characters that the vocabulary lacks",
                where=utterance.where,
                given=f"{' '.join(sorted(map(repr, unknown)))} in {text!r}",
                do="set task.unknown: drop or task.lowercase: true, or choose another model.vocabulary",
            )
        said = "".join(char for char in text if char not in unknown).strip()
        ids = [] if not said else self._ids(said, language)
        if not ids:
            problem = "no character of the text is in the vocabulary"
            raise BadExample("no_known_characters", problem, where=utterance.where, given=repr(text))
        return ids

    def _ids(self, text: str, language: str | None) -> list[int]:
        return self.tokens.encode(text, language) if self.prompts is None else self.prompts.answer(text, language)

    def notes(self, example: Utterance) -> Mapping[str, int]:
        """Characters that are dropped."""
        if self.recipe.task.unknown == "refuse":
            return {}
        text = self.text(example)
        unknown = self.tokens.unknown(text, self.language(example))
        return Counter(f"unknown characters dropped: {char!r}" for char in text if char in unknown)

    # ------------------------------------------------------------------ check

    def check(self, utterance: Utterance, training: bool) -> None:
        self.prompt(utterance)
        if training:  # a text that can't be trained on is still a reference
            self.aligned(utterance, self.frames(self.shortest(utterance)))

    def aligned(self, utterance: Utterance, frames: int) -> list[int]:
        """Tokens of the text, if so many feature frames are enough for them.

        Raises:
            BadExample: they aren't.
        """
        ids = self.target(utterance)
        if self.prompts is not None:
            self.fitting(utterance, ids)
        if self.encoded_frames is None:
            return ids
        steps, name = self.encoded_frames(frames), self.origin.name
        if "CTC" in name:
            check_alignable(utterance, ids, steps)
        if "RNNT" in name and len(ids) > steps * self.symbols:
            raise BadExample(
                "too_short_for_rnnt",
                "the audio has too few frames for as many tokens as its text has",
                where=utterance.where,
                given=f"{len(ids)} tokens, {steps} frames",
                expected=f"at most {self.symbols} tokens a frame, as decoding allows (greedy.max_symbols)",
            )
        if steps < 1:
            problem, given = "the encoder needs more audio", f"{frames} frames"
            raise BadExample("too_short", problem, where=utterance.where, given=given)
        return ids

    def fitting(self, utterance: Utterance, ids: Sequence[int]) -> None:
        """Refuse a text that has more tokens, its prompt among them, than the decoder has places."""
        section, tokens = self.origin.config.transf_decoder, len(self.prompt(utterance)) + len(ids) - 1
        most = int((section.get("config_dict") or section).get("max_sequence_length", _PLACES))
        if tokens > most:
            problem = "the text has more tokens than the decoder"
            raise BadExample("text_too_long", problem, where=utterance.where, given=tokens, expected=most)

    @cached_property
    def symbols(self) -> int:
        """Most tokens that a transducer writes at one frame."""
        greedy = (self.origin.config.get("decoding") or {}).get("greedy") or {}
        return int(greedy.get("max_symbols") or greedy.get("max_symbols_per_step") or _SYMBOLS)

    # ------------------------------------------------------------------ encoding

    def encode(self, example: Utterance, generator: np.random.Generator | None) -> Encoded:
        features, prompt = self.hear(example, generator).features, self.prompt(example)
        if generator is not None:
            return Encoded(self.augment.features(features, generator), self.target(example), example, prompt)
        try:
            tokens = self.aligned(example, features.shape[1])
        except BadExample:
            return Encoded(features, None, example, prompt)
        return Encoded(features, tokens, example, prompt)

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """A batch.

        Returns:
            features: [B, F, T], padded as NeMo pads a batch.
            frames: of real audio [B].
            tokens: of the prompts and texts [B, L], padded with 0.
            lengths: their number [B].
            prompts: how many of them are the prompt's [B].
            carries: whether a row has loss [B].
            utterances: list of them.
        """
        frames = [item.features.shape[1] for item in encoded]
        width = self._padded(max(frames) + self.tail)
        features = encoded[0].features.new_full((len(encoded), len(encoded[0].features), width), float(self.pad_value))
        texts = [[*item.prompt, *(item.tokens or ())] for item in encoded]
        tokens = torch.zeros(len(encoded), max(1, *map(len, texts)), dtype=torch.long)
        for row, (item, ids) in enumerate(zip(encoded, texts, strict=True)):
            features[row, :, : frames[row]] = item.features
            tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        return {
            "features": features,
            "frames": torch.tensor(frames),
            "tokens": tokens,
            "lengths": torch.tensor([len(ids) for ids in texts]),
            "prompts": torch.tensor([len(item.prompt) for item in encoded]),
            "carries": torch.tensor([item.tokens is not None for item in encoded]),
            "utterances": [item.utterance for item in encoded],
        }

    def _padded(self, frames: int) -> int:
        """Frames to which NeMo pads."""
        if self.pad_to == "max":
            return max(frames, int(self.featurizer.max_length))
        return -(-frames // self.pad_to) * self.pad_to if self.pad_to else frames

    def show(self, data: dict[str, Any], row: int) -> Shown:
        utterance, frames, length = data["utterances"][row], int(data["frames"][row]), int(data["lengths"][row])
        facts = {
            "audio": f"{utterance.duration:.2f} s",
            "features": f"{frames} of {data['features'].shape[2]} frames",
            "text": utterance.text,
        }
        pieces = [self.tokens.pieces[token] for token in data["tokens"][row, :length].tolist()]
        tokens = [(piece, place >= int(data["prompts"][row])) for place, piece in enumerate(pieces)]
        return Shown(utterance.where, facts, tokens, draw(data["features"][row, :, :frames]))


def _preprocessor(section: Any) -> Any:
    """NeMo's preprocessor as it is in an evaluation: the same audio gives the same features."""
    from nemo.collections.asr.models import ASRModel

    return ASRModel.from_config_dict(section).eval()
