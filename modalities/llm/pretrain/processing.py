"""Texts one after another, cut into blocks: no token is lost, and no text sees another."""

from __future__ import annotations

from pathlib import Path

from ....common.errors import BadExample
from ..chat import encode_plain
from ..conversation import Conversation, Text
from ..lengths import Cut
from ..model import load_tokenizer
from ..packing import block, blocks
from ..processing import Encoded, TokenProcessing
from ..tokens import Tokens
from .config import Config


class BlockProcessing(TokenProcessing):
    """The data path of a recipe.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model, whose tokenizer is used.
    """

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, load_tokenizer(recipe.model, weights))

    def tokens_of(self, item: Conversation | Text) -> tuple[Tokens, Cut]:
        if isinstance(item, Conversation) or item.prompt is not None:
            raise BadExample("not_a_text", "the row is no plain text", where=item.where, do="use the kind llm.sft")
        return encode_plain(self.tokenizer, item), Cut()

    def arrange(self, examples: list[Encoded], training: bool) -> list[Encoded]:
        """Blocks of `data.max_length` tokens. An evaluation keeps its texts apart, each cut into its own blocks."""
        if training:
            return self._blocks(examples)
        return [block for example in examples for block in self._blocks([example])]

    def _blocks(self, examples: list[Encoded]) -> list[Encoded]:
        documents = [document for example in examples for document in example.documents]
        found = []
        for pieces in blocks([len(one) for one in documents], self.recipe.data.max_length):
            first = examples[pieces[0].document]
            found.append(Encoded(block(pieces, documents), first.where, first.fields, item=first.item))
        return found

    def terminators(self) -> tuple[int, ...]:
        return (self.tokenizer.eos_token_id,)
