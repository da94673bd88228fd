"""SenseVoice among FunASR's models: a CTC model that is also asked for language, emotion, event and style of writing.

Four queries stand before the audio, and the model answers each with a control token. FunASR knows the styles, and the
languages that it may be told, by their numbers in the released vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ....common.errors import BadExample, ModelError
from ..utterance import Utterance
from .tokens import Tokens

NAME = "SenseVoiceSmall"
QUERIES = 4
"""Positions before those of the audio."""
STYLES = {"<|withitn|>": 25016, "<|woitn|>": 25017}
"""Numbers under which FunASR looks for the styles: numerals and punctuation as written, or as spoken."""
USUAL = {"emo_target": "<|NEUTRAL|>", "event_target": "<|Speech|>", "with_or_wo_itn": "<|woitn|>"}
"""Fields of FunASR's manifests for this model, in the order of the queries, and what it takes where a row has none."""
_TAG = re.compile(r"<\|[^|]*\|>")


class Tags:
    """The control tokens of rows.

    Args:
        tokens: the vocabulary.
        language: of rows that name none.

    Raises:
        ModelError: the vocabulary has the styles under other numbers than FunASR looks for.
    """

    def __init__(self, tokens: Tokens, language: str | None):
        self.tokens, self.language = tokens, language
        found = {style: tokens.number(style) for style in STYLES}
        if found != STYLES:
            problem = "the vocabulary is not that of SenseVoice: FunASR has the styles of writing under fixed numbers"
            raise ModelError(problem, where="model.path", given=found, expected=STYLES)

    def encode(self, utterance: Utterance) -> list[int]:
        """Numbers of language, emotion, event and style.

        Raises:
            BadExample: the vocabulary lacks one of them.
        """
        language = utterance.language or self.language
        if language is None:
            raise BadExample(
                "no_language", "the model learns to name the language", where=utterance.where,
                do="name it in the rows, or set task.language",
            )  # fmt: skip
        named = [f"<|{language}|>", *(str(utterance.extra.get(field) or tag) for field, tag in USUAL.items())]
        numbers = [self.tokens.number(tag) for tag in named]
        for tag, number in zip(named, numbers, strict=True):
            if number is None or (tag == named[-1] and tag not in STYLES):
                reason = "unknown_language" if tag == named[0] else "unknown_tag"
                raise BadExample(reason, "the model has no such control token", where=utterance.where, given=tag)
        return [number for number in numbers if number is not None]


def style(utterance: Utterance) -> str:
    """How FunASR's inference calls the style in which an utterance is to be written."""
    return str(utterance.extra.get("with_or_wo_itn") or USUAL["with_or_wo_itn"]).strip("<|>")


def plain(text: str) -> str:
    """A transcript without its control tokens."""
    return _TAG.sub("", text).strip()


@contextmanager
def untold(model: Any) -> Iterator[None]:
    """Context in which the model is never told the language, as its inference is by default; in training it is told
    that of four rows in five, which FunASR draws."""
    told: Mapping[int, int] = model.lid_int_dict
    model.lid_int_dict = {}
    try:
        yield
    finally:
        model.lid_int_dict = told


@torch.no_grad()
def scores(model: Any, features: Tensor, written: str = "woitn") -> Tensor:
    """Log-probabilities [T, V] of the queries' answers and the frames of features [T - 4, F]; the language untold."""
    asked = torch.tensor([[0, 1, 2, model.textnorm_dict[written]]], device=features.device)
    speech = torch.cat([model.embed(asked), features[None]], dim=1)
    encoded, _ = model.encoder(speech, torch.tensor([speech.shape[1]], device=features.device))
    found: Tensor = model.ctc.log_softmax(encoded)[0]
    return found
