"""The data path of a language model: rows become tokens once, and batches join them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ...common.data.processing import Processing, Shown
from ...common.data.rows import Cursor
from ...common.errors import BadExample
from ...common.recipe import Source
from . import shapes
from .batch import join
from .conversation import Conversation, Text
from .generate import Prompt
from .lengths import Cut
from .tokens import IGNORED, Document, Tokens

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as it is trained on.

    Args:
        documents: what it is made of; one, but for blocks of several texts.
        where: place in the source.
        fields: what it may be sliced by; only in an evaluation.
        notes: what was cut from it, to be counted.
        item: what it was made of; only in an evaluation.
        prompt: what the model is asked; only in an evaluation by generation.
    """

    documents: tuple[Document, ...]
    where: str
    fields: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    notes: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    item: Conversation | Text | None = None
    prompt: Prompt | None = None

    def __len__(self) -> int:
        return sum(map(len, self.documents))


class TokenProcessing(Processing[Encoded]):
    """What the trainings of language models share; a subclass makes tokens of an item.

    Args:
        recipe: slices and shape of the rows.
        tokenizer: of the model.
    """

    unit = "tokens"
    joined = True

    def __init__(self, recipe: Any, tokenizer: Any):
        self.recipe, self.tokenizer = recipe, tokenizer

    def tokens_of(self, item: Conversation | Text) -> tuple[Tokens, Cut]:
        """Tokens of an item within `data.max_length`, and what was cut. Raises BadExample."""
        raise NotImplementedError

    def terminators(self) -> tuple[int, ...]:
        """Ids at which generation is to stop."""
        raise NotImplementedError

    def prompt_of(self, item: Conversation | Text, tokens: Tokens, cut: Cut) -> Prompt | None:
        """What the model is asked in an evaluation by generation; None: nothing. Raises BadExample."""
        return None

    def read(self, source: Source) -> Iterator[Any]:
        return shapes.items(source.path, source.split, source.label, self.recipe.data.shape)

    def stream(self, source: Source, cursor: Cursor) -> Iterator[Any]:
        return shapes.items(source.path, source.split, source.label, self.recipe.data.shape, cursor)

    def examine(self, example: Any, training: bool) -> list[Encoded]:
        tokens, cut = self.tokens_of(example)
        if len(tokens) < 2 or not tokens.trained[1:].any():
            raise BadExample("no_target", "no token is left to be predicted", where=example.where)
        documents, noted = (Document.of(tokens),), counted(tokens, cut) or NOTHING
        if training:
            return [Encoded(documents, example.where, notes=noted)]
        fields = {"source": example.source, **example.extra}
        fields = {name: fields[name] for name in self.recipe.evaluate.slices if fields.get(name) is not None}
        return [Encoded(documents, example.where, fields, noted, example, self.prompt_of(example, tokens, cut))]

    def notes(self, example: Encoded) -> Mapping[str, int]:
        return example.notes

    def contents(self, example: Encoded) -> Iterable[Hashable]:
        return (document.ids.tobytes() for document in example.documents)

    def units(self, example: Encoded) -> Sequence[Hashable]:
        return [token for document in example.documents for token in document.ids.tolist()]

    def cost(self, example: Encoded) -> float:
        return float(len(example))

    def name(self, example: Encoded) -> str:
        return example.where

    def encode(self, example: Encoded, generator: np.random.Generator | None) -> Encoded:
        return example

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """The tensors of `batch.join`; `ends`: where each example ends in the row; and `fields`, `where`, `items`,
        `prompts`: lists of what each example is."""
        return {
            **join([document for one in encoded for document in one.documents]),
            "ends": list(accumulate(len(one) for one in encoded)),
            "fields": [one.fields for one in encoded],
            "where": [one.where for one in encoded],
            "items": [one.item for one in encoded],
            "prompts": [one.prompt for one in encoded],
        }

    def show(self, data: dict[str, Any], row: int) -> Shown:
        begin, end = data["ends"][row - 1] if row else 0, data["ends"][row]
        ids = data["input_ids"][begin:end].tolist()
        carries = [False, *(data["targets"][begin : end - 1] != IGNORED).tolist()]
        facts = {"tokens": str(end - begin), "with loss": str(sum(carries))}
        starts = [bound - begin for bound in data["bounds"].tolist() if begin <= bound < end]
        borders: tuple[tuple[int, str], ...] = ()
        if len(starts) > 1:
            facts["documents"] = str(len(starts))
            borders = tuple((start, f"document {number}") for number, start in enumerate(starts, 1))
        tokens = list(zip(pieces(self.tokenizer, ids), carries, strict=True))
        return Shown(data["where"][row], facts, tokens, parts=borders)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token after the one before it: alone, some tokenizers would leave out a space."""
    alone = [tokenizer.decode([number]) for number in ids]
    pairs = [tokenizer.decode(list(pair)) for pair in pairwise(ids)]
    return [*alone[:1], *(pair.removeprefix(before) for pair, before in zip(pairs, alone, strict=False))]


def counted(tokens: Tokens, cut: Cut) -> dict[str, int]:
    """What was left out of an example, by name."""
    found = {
        "examples cut": int(bool(cut)),
        "exchanges cut": cut.exchanges,
        "prompt tokens cut": cut.prompt,
        "answer tokens cut": cut.answer,
        "tokens after the answer cut": cut.tail,
        "messages left out by the template": tokens.lost,
    }
    return {name: number for name, number in found.items() if number}
