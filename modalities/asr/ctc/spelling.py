"""From a transcript to what a CTC model is to write, and from a training set to a vocabulary of characters."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import regex  # type: ignore[import-untyped]

from ....common.errors import BadExample
from .config import CtcTask, SpellingSection

# Punctuation and symbols, unless an apostrophe or hyphen stands between two letters.
_PUNCTUATION = regex.compile(
    r"(?<![\p{L}\p{M}\p{N}])['’\-]|['’\-](?![\p{L}\p{M}\p{N}])|[[\p{P}\p{S}]--['’\-]]", regex.V1
)
_SPACES = re.compile(r"\s+")


def spell(text: str, section: SpellingSection) -> str:
    """The transcript in Unicode's composed form, as the recipe wants it spelled, with single spaces."""
    for old, new in section.replace:
        text = text.replace(old, new)
    text = unicodedata.normalize("NFC", text)
    if section.punctuation == "remove":
        text = _PUNCTUATION.sub(" ", text)
    if section.case != "keep":
        text = text.lower() if section.case == "lower" else text.upper()
    return _SPACES.sub(" ", text).strip()


def characters(texts: Iterable[str], section: CtcTask) -> list[str]:
    """The characters of a training set that are frequent enough, in the order of their code points, no space."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(spell(text, section.spelling))
    return sorted(char for char, count in counts.items() if count >= section.min_count and not char.isspace())


class Labels:
    """Labels of transcripts.

    Args:
        tokenizer: the model's; its padding token is CTC's blank.
        section: spelling, and what becomes of characters that the vocabulary lacks.
    """

    def __init__(self, tokenizer: Any, section: CtcTask):
        self.tokenizer, self.section = tokenizer, section
        self.blank = int(tokenizer.pad_token_id)
        self._unknown_id = tokenizer.unk_token_id
        self._delimiter = getattr(tokenizer, "_word_delimiter_token", None)
        self._lacks = cache(self._is_unknown)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lacks"}  # for data workers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lacks = cache(self._is_unknown)

    def spell(self, text: str) -> str:
        """The transcript as the model is to write it."""
        return spell(text, self.section.spelling)

    def unknown(self, text: str) -> Counter[str]:
        """The characters of a transcript that the vocabulary lacks, and how often each is there."""
        return Counter(char for char in self.spell(text) if self._lacks(char))

    def ids(self, text: str, where: str) -> tuple[int, ...]:
        """Labels of a transcript.

        Args:
            text: as the source has it.
            where: place in the source, named in errors.

        Raises:
            BadExample: `text_not_in_vocabulary`, `empty_text` (nothing to write is left), `control_token`.
        """
        spelled = self.spell(text)
        lacking = self.unknown(text)
        if lacking and self.section.unknown == "refuse":
            shown = ", ".join(f"{char!r}" for char, _ in lacking.most_common(8))
            raise BadExample(
                "text_not_in_vocabulary",
                f"the vocabulary lacks {shown}",
                where=where,
                given=text,
                do="set task.spelling, task.vocabulary: extend, or task.unknown: drop",
            )
        if lacking and self.section.unknown == "drop":
            spelled = _SPACES.sub(" ", "".join(char for char in spelled if char not in lacking)).strip()
        found = self._encode(spelled)
        if not found:
            raise BadExample("empty_text", "nothing that the model could write is left", where=where, given=text)
        if self.blank in found:
            raise BadExample("control_token", "the text spells the blank token", where=where, given=text)
        return tuple(found)

    def known(self, text: str) -> tuple[int, ...]:
        """Labels of what the vocabulary can write of a text; () if that is nothing."""
        spelled = "".join(char for char in self.spell(text) if not self._lacks(char))
        return tuple(label for label in self._encode(spelled) if label != self.blank) if spelled.strip() else ()

    @property
    def space(self) -> int | None:
        """The label between words, where there is one."""
        found = self.tokenizer.get_vocab().get(self._delimiter) if self._delimiter else None
        return None if found is None else int(found)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _is_unknown(self, char: str) -> bool:
        if char == self._delimiter:
            return True  # it would be written as a space
        ids = self._encode(char)
        return not ids or any(token is None or token == self._unknown_id for token in ids)

    def piece(self, label: int) -> str:
        """The text of one label, with the space that it stands for or begins with."""
        token: str = self.tokenizer.convert_ids_to_tokens(label)
        return " " if token == self._delimiter else token.replace("\u2581", " ")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the best label of each frame: repeated ones joined, blanks left out."""
        text: str = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text.strip()
