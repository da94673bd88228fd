"""What the decoder reads and what it is to say: control tokens by name, prompts, timestamps, text, end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....common.errors import BadExample, ModelError
from ..utterance import Segment, Utterance
from .config import WhisperTask

if TYPE_CHECKING:
    from transformers import GenerationConfig, WhisperTokenizer

TIME_STEP = 0.02
"""Seconds between two timestamp tokens."""


@dataclass(frozen=True)
class Target:
    """Token ids of one utterance.

    Args:
        prompt: start-of-previous and prompt tokens; read, never said.
        control: start, language, task, no-timestamps.
        text: the transcript with its timestamps, and the end token.
        asked: whether it carries loss.
    """

    prompt: tuple[int, ...]
    control: tuple[int, ...]
    text: tuple[int, ...]
    asked: bool = True

    @property
    def inputs(self) -> list[int]:
        """What the decoder reads, [T]."""
        return [*self.prompt, *self.control, *self.text[:-1]]

    @property
    def labels(self) -> list[int]:
        """What it says at each place, [T]; -100 where nothing is asked. The control tokens after the start are asked,
        as Whisper was trained and as transformers' loss does."""
        if not self.asked:
            return [-100] * len(self.inputs)
        return [-100] * len(self.prompt) + [*self.control[1:], *self.text]


class Targets:
    """Makes the targets of utterances.

    Args:
        tokenizer: Whisper's.
        generation: says whether the model is multilingual.
        section: language, task and timestamps of the recipe.
        positions: most decoder positions.

    Raises:
        ModelError: the vocabulary lacks a token that the recipe needs.
    """

    def __init__(self, tokenizer: WhisperTokenizer, generation: GenerationConfig, section: WhisperTask, positions: int):
        self.tokenizer, self.section, self.positions = tokenizer, section, positions
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.controls = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.multilingual = is_multilingual(generation, self.vocabulary)
        self.end = self._needed("<|endoftext|>")
        self.start = self._needed("<|startoftranscript|>")
        self.no_timestamps = self._needed("<|notimestamps|>")
        if section.timestamps:
            self._needed("<|0.00|>")
        if self.multilingual:
            self._needed(f"<|{section.task}|>")
            if section.language is not None and language_token(section.language) not in self.vocabulary:
                raise ModelError(
                    "the model has no token for this language",
                    where="task.language",
                    given=section.language,
                    do="use a language that the model knows",
                )
        elif section.task != "transcribe":
            raise ModelError("an English-only model can't translate", where="task.task", given=section.task)

    def _needed(self, token: str) -> int:
        if token not in self.vocabulary:
            raise ModelError("the tokenizer lacks a control token of Whisper", where="model.path", expected=token)
        return self.vocabulary[token]

    def language(self, utterance: Utterance) -> str | None:
        """Language of an utterance: its own, else the recipe's."""
        return utterance.language or self.section.language

    def control(self, utterance: Utterance) -> tuple[int, ...]:
        """The control tokens of an utterance.

        Raises:
            BadExample: `no_language` or `unknown_language`, for a multilingual model.
        """
        ids = [self.start]
        if self.multilingual:
            language = self.language(utterance)
            if language is None:
                raise BadExample(
                    "no_language",
                    "a multilingual model needs the language",
                    where=utterance.where,
                    do="set task.language, or give the row a language",
                )
            token = language_token(language)
            if token not in self.vocabulary:
                raise BadExample(
                    "unknown_language",
                    "the model has no token for this language",
                    where=utterance.where,
                    given=language,
                )
            ids += [self.vocabulary[token], self.vocabulary[f"<|{self.section.task}|>"]]
        return tuple(ids) if self.section.timestamps else (*ids, self.no_timestamps)

    def unasked(self, utterance: Utterance) -> Target:
        """The decoder's prompt alone, of an utterance whose text can't be a target but is a reference."""
        return Target(self.prompt(utterance, 0), self.control(utterance), (self.end,), asked=False)

    def prompt(self, utterance: Utterance, reserved: int) -> tuple[int, ...]:
        """Start-of-previous and the prompt's last tokens; () without one.

        Args:
            reserved: positions that the rest of the target needs; the prompt is cut at its begin to leave them, and to
                half of the decoder's positions.
        """
        room = min(self.positions // 2, self.positions - reserved) - 1
        if not utterance.prompt or room < 1:
            return ()
        ids = self._text(" " + utterance.prompt.strip(), utterance)
        return (self._needed("<|startofprev|>"), *ids[-room:])

    def target(self, utterance: Utterance, stretch: float = 1.0) -> Target:
        """All tokens of an utterance; times are multiplied by `stretch` (speed perturbation).

        Raises:
            BadExample: `text_too_long`, `text_not_in_vocabulary`, `control_token`, or what `control` raises.
        """
        timed = self.section.timestamps
        text = self._timed(utterance, stretch) if timed else self._text(utterance.text, utterance)
        control = self.control(utterance)
        target = Target(self.prompt(utterance, len(control) + len(text)), control, (*text, self.end))
        if len(target.inputs) > self.positions:
            raise BadExample(
                "text_too_long",
                "the transcript exceeds the decoder's positions",
                where=utterance.where,
                given=f"{len(target.inputs)} tokens",
                expected=f"at most {self.positions}",
            )
        return target

    def times(self, ids: Iterable[int]) -> tuple[Segment, ...]:
        """The stretches that a transcript's timestamp tokens mark; () without timestamps in the recipe."""
        if not self.section.timestamps:
            return ()
        zero = self._needed("<|0.00|>")
        start: float | None = None
        text: list[int] = []
        found = []
        for token in ids:
            if token < zero:
                text.append(token)
                continue
            time = (token - zero) * TIME_STEP
            if start is not None and text:
                found.append(Segment(start, time, self.tokenizer.decode(text, skip_special_tokens=True).strip()))
            start, text = time, []
        return tuple(found)

    def languages(self) -> dict[str, int]:
        """The language tokens of the vocabulary, as a generation config names them."""
        return {token: number for token, number in self.vocabulary.items() if _is_language(token)}

    def tasks(self) -> dict[str, int]:
        """The task tokens of the vocabulary, as a generation config names them."""
        names = ("transcribe", "translate")
        return {name: self.vocabulary[f"<|{name}|>"] for name in names if f"<|{name}|>" in self.vocabulary}

    def _text(self, text: str, utterance: Utterance) -> list[int]:
        ids = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        written = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip()
        if written != text.strip():
            raise BadExample(
                "text_not_in_vocabulary",
                "the tokenizer can't write this text",
                where=utterance.where,
                given=text,
                expected=written,
            )
        if not self.controls.isdisjoint(ids):
            raise BadExample("control_token", "the text spells a control token", where=utterance.where, given=text)
        return ids

    def _timed(self, utterance: Utterance, stretch: float) -> list[int]:
        # The checks let a segment end a little after the audio, where there may be no token for it.
        last = math.inf if utterance.duration is None else utterance.duration
        whole = Segment(0.0, utterance.duration or 0.0, utterance.text)
        segments = [segment for segment in utterance.segments if segment.text.strip()] or [whole]
        # Without its timestamps the target is to read as the text; languages without spaces need none between.
        texts = [segment.text.strip() for segment in segments]
        glue = "" if "".join(texts) == utterance.text.strip() else " "
        ids: list[int] = []
        for number, (segment, text) in enumerate(zip(segments, texts, strict=True)):
            start, end = (self._time(min(time, last) * stretch) for time in (segment.start, segment.end))
            ids += [start, *self._text(f"{glue}{text}" if number else text, utterance), end]
        return ids

    def _time(self, seconds: float) -> int:
        token = f"<|{round(seconds / TIME_STEP) * TIME_STEP:.2f}|>"
        return self._needed(token)


def _is_language(token: str) -> bool:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return token.startswith("<|") and token[2:-2] in LANGUAGES


def is_multilingual(generation: GenerationConfig, vocabulary: dict[str, int]) -> bool:
    """Whether the model takes language and task tokens."""
    known = getattr(generation, "is_multilingual", None)
    if known is not None:
        return bool(known)
    return getattr(generation, "lang_to_id", None) is not None or len(vocabulary) >= 51865


def language_token(language: str) -> str:
    """`<|it|>` for `it`, `Italian` or `it-IT`."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    plain = language.strip().lower()
    code = TO_LANGUAGE_CODE.get(plain) or TO_LANGUAGE_CODE.get(plain.split("-")[0].split("_")[0])
    return f"<|{code or plain.split('-')[0].split('_')[0]}|>"
