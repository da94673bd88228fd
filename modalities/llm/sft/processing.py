"""Conversations and prompts as tokens with their loss mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ....common.errors import BadExample, LuthierError
from .. import doubts
from ..chat import Chat, encode_plain, plain_prompt
from ..conversation import Conversation, Text
from ..generate import Prompt
from ..lengths import Cut, Limit, cut, fit, shortened
from ..model import load_tokenizer
from ..processing import TokenProcessing
from ..tokens import Document, Tokens


class ChatProcessing(TokenProcessing):
    """The data path of a recipe.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model, whose tokenizer is used.
    """

    def __init__(self, recipe: Any, weights: Path | None = None):
        super().__init__(recipe, load_tokenizer(recipe.model, weights, recipe.data.chat_template))
        section = recipe.data
        self.limit = Limit(section.max_length, section.too_long.turns, section.too_long.prompt, section.too_long.answer)

    @cached_property
    def chat(self) -> Chat:
        """Made when the first conversation comes: plain text needs no template."""
        section = self.recipe.data
        return Chat(
            self.tokenizer,
            roles=section.roles,
            turns=section.turns,
            control=section.control_tokens,
            keep_lost=section.keep_lost,
        )

    def tokens_of(self, item: Conversation | Text) -> tuple[Tokens, Cut]:
        if isinstance(item, Text):
            if item.prompt is None or self.recipe.data.plain:
                return cut(encode_plain(self.tokenizer, item), self.limit, item.where)
            item = item.as_conversation()
        _, tokens, taken = fit(item, self.chat, self.limit)
        return tokens, taken

    def prompt_of(self, item: Conversation | Text, tokens: Tokens, taken: Cut) -> Prompt | None:
        """The text or conversation before its last answer, cut as in training; None without `evaluate.generate`, and
        if there is nothing before it."""
        if self.recipe.evaluate.generate is None:
            return None
        found = self._asked(item, taken)
        if found is None:
            return None
        ids, reference = found
        kept = len(ids) - taken.prompt
        if kept > len(tokens):
            raise BadExample("too_long", "the policy for long examples cuts the last question too", where=item.where)
        ids = tokens.ids[:kept] if taken.prompt else ids
        return Prompt(ids.astype(np.int32), reference, item.extra)

    def _asked(self, item: Conversation | Text, taken: Cut) -> tuple[np.ndarray, str] | None:
        if isinstance(item, Text):
            if item.prompt is None:
                return None
            if self.recipe.data.plain:
                ids = plain_prompt(self.tokenizer, item)
                return (ids, item.text) if len(ids) else None
            item = item.as_conversation()
        if taken.exchanges:
            item = shortened(item, self.chat.wanted(item))[taken.exchanges]
        return self.chat.prompt(item)

    def doubts(self, examples: Sequence[Any]) -> Iterable[LuthierError]:
        yield from doubts.of_ends(self._answers(examples), self.terminators(), self.tokenizer)
        yield from doubts.of_cuts([one.notes for one in examples])

    def _answers(self, examples: Sequence[Any]) -> Iterable[Document]:
        """Documents of which the end has not been cut."""
        for one in examples:
            if "answer tokens cut" not in one.notes:
                yield from one.documents

    def terminators(self) -> tuple[int, ...]:
        if self.tokenizer.chat_template and not self.recipe.data.plain:
            return self.chat.terminators()
        return (self.tokenizer.eos_token_id,)
