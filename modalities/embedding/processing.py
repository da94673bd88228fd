"""The data path of embedding models: rows become tokens once, and a batch holds each of its texts once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...common.data.processing import Processing, Shown
from ...common.data.rows import Cursor
from ...common.errors import BadExample, DataError, LuthierError, RecipeError
from ...common.recipe import Source
from . import beir, doubts, roles
from .config import EmbeddingRecipe, EmbeddingSource
from .example import NOTHING, Example, Text
from .losses.contrastive import known_positives
from .rows import Row
from .tokenizer import TextTokenizer, resolved

CLASSES = ("classes", "labelled")
"""Shapes whose labels are classes."""


class EmbeddingProcessing(Processing[Example]):
    """The data path of a recipe.

    A query gets the query's prompt, a document the document's. The two texts of a similarity or a class, and a text
    with a label, are alike: they get the query's.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model, whose tokenizer and settings are used.
    """

    unit = "tokens"
    joined = True  # texts are sorted and run in chunks, so that nothing is gained by batches of similar lengths
    has_corpus: ClassVar[bool] = True
    """Whether an evaluation can use documents that belong to no query."""

    def __init__(self, recipe: EmbeddingRecipe, weights: Path | None = None):
        self.recipe = recipe
        section = recipe.data
        self.sources: tuple[EmbeddingSource, ...] = (
            *section.train, *section.validation, *section.regression, *section.test,
        )  # fmt: skip
        self.tokenizer = TextTokenizer(recipe.model, weights)
        self.prompts = resolved(self.tokenizer, section.prompts.model_dump())
        limit_of, longest, query = self.tokenizer.limit_of, section.max_length, section.query_max_length
        self.limits = {
            "document": limit_of("document", longest, "data.max_length"),
            "query": limit_of("query", query or longest, "data.query_max_length" if query else "data.max_length"),
        }
        for source in self.sources:
            for role, limit in self.limits.items():
                self._check_room(self.prompt_of(source, role), limit)

    def _check_room(self, prompt: str, limit: int) -> None:
        taken = self.tokenizer.prompt_tokens(prompt)
        if taken + 2 > limit:
            raise RecipeError(
                "a prompt leaves no room for the text",
                where="data.prompts",
                given=f"{taken} tokens: {prompt}",
                expected=f"well below the longest text of {limit}",
                do="shorten it, or raise data.max_length",
            )

    def prompt_of(self, source: EmbeddingSource, role: str) -> str:
        """What stands before a `query` or `document` of a data set."""
        own = source.query_prompt if role == "query" else source.document_prompt
        return self.prompts[role] if own is None else own

    def read(self, source: Source) -> Iterator[Any]:
        return self._rows(source, None)

    def stream(self, source: Source, cursor: Cursor) -> Iterator[Any]:
        return self._rows(source, cursor)

    def _rows(self, source: Source, cursor: Cursor | None) -> Iterator[Any]:
        number = self._number(source)
        known = self.sources[number]
        if beir.is_beir(known.path):  # it is read as a whole in any case
            return beir.items(known.path, known.split, known.label, number)
        declared = known.roles.declared() if known.roles is not None else {}
        return roles.items(known.path, known.split, known.label, declared, number, cursor)

    def _number(self, source: Source) -> int:
        same = [number for number, one in enumerate(self.sources) if one is source]
        return same[0] if same else list[Source](self.sources).index(source)

    def examine(self, example: Any, training: bool) -> list[Example]:
        row: Row = example
        if row.query is None and (training or not self.has_corpus):
            return [Example(None, (), (), (), row.source, row.where)]  # left out by `arrange`: it is no bad row
        query, documents = self.texts(row)
        wanted = () if training else self.recipe.evaluate.slices
        fields = {name: row.fields[name] for name in wanted if row.fields.get(name) is not None} or NOTHING
        found = Example(query, documents, row.labels, row.scores, row.source, row.where, row.shape, fields=fields)
        return [found]

    def texts(self, row: Row) -> tuple[Text | None, tuple[Text, ...]]:
        """Query and documents of a row as tokens. Raises BadExample."""
        source = self.sources[row.source]
        role = "document" if row.shape == "groups" else "query"
        found = self._read(source, "query", () if row.query is None else (row.query,))
        documents = self._read(source, role, row.documents)
        if not all(len(text.ids) for text in (*found, *documents)):
            raise BadExample("no_tokens", "the tokenizer makes nothing of a text", where=row.where)
        return (found[0] if found else None), tuple(documents)

    def _read(self, source: EmbeddingSource, role: str, texts: Sequence[str]) -> list[Text]:
        return self.tokenizer.texts(texts, self.limits[role], self.prompt_of(source, role))

    def notes(self, example: Example) -> Mapping[str, int]:
        found = {
            "query tokens cut": 0 if example.query is None else example.query.cut,
            "document tokens cut": sum(text.cut for text in example.documents),
        }
        return {name: number for name, number in found.items() if number}

    def arrange(self, examples: list[Example], training: bool) -> list[Example]:
        """The examples of one data set, each with all documents that are relevant to its query in any of them."""
        usable = [one for one in examples if one.documents or one.query is not None]
        scored = sum(bool(one.scores) for one in usable)
        if training and 0 < scored < len(usable):
            raise DataError(
                "some rows have a teacher's scores and some have none",
                where=self.sources[usable[0].source].path,
                given=f"{scored} of {len(usable)} rows have",
                expected="all or none",
            )
        relevant: dict[int, set[int]] = {}
        for one in usable:
            if one.shape == "groups" and one.query is not None:
                keys = (text.key for text, label in zip(one.documents, one.labels, strict=True) if label > 0)
                relevant.setdefault(one.query.key, set()).update(keys)
        known = {query: tuple(sorted(keys)) for query, keys in relevant.items()}
        return [
            replace(one, known=known[one.query.key]) if one.shape == "groups" and one.query is not None else one
            for one in usable
        ]

    def contents(self, example: Example) -> Iterable[Hashable]:
        """The query with each document that belongs to it; of a document without query nothing."""
        if example.query is None:
            return ()
        labels = example.labels if example.shape == "groups" else (1.0,) * len(example.documents)
        related = [text.key for text, label in zip(example.documents, labels, strict=True) if label > 0]
        return [(example.query.key, key) for key in related] if example.documents else [(example.query.key,)]

    def units(self, example: Example) -> Sequence[Hashable]:
        return [token for text in example.texts for token in text.ids.tolist()]

    def doubts(self, examples: Sequence[Example]) -> Iterable[LuthierError]:
        return doubts.found(examples)

    def cost(self, example: Example) -> float:
        return float(example.tokens)

    def group(self, example: Example) -> int:
        """Which examples may form a batch: those of one data set."""
        return example.source

    def encode(self, example: Example, generator: np.random.Generator | None) -> Example:
        return example

    def collate(self, encoded: Sequence[Example], generator: np.random.Generator | None) -> dict[str, Any]:
        """Q examples with M documents in all, made of U texts that differ. Texts of the same tokens are one.

        Returns:
            `input_ids`, `attention_mask` [U, T]: the texts, the longest first, padded at the right;
            `token_type_ids` [U, T], `prompt_lengths` [U] or None: which of two texts, tokens of the prompt;
            `queries` [Q], `documents` [M]: which text it is, -1 where there is no query to be run;
            `owner` [M]: which query a document is compared with;
            `labels`, `scores` [M] float32, `scores` None without a teacher;
            `query_keys` [Q], `document_keys` [M]: of the texts, -1 where there is no query;
            `known` [Q, K]: keys of all documents known to be relevant, filled up with -1;
            `classes` [Q]: class of the text or pair, -1 where there is none;
            `shape`, `source`: of the data set; `where`, `fields` of the examples, `cuts` of the texts: lists.
        """
        texts, places = _unique([text for one in encoded for text in one.texts if len(text.ids)])
        owner = [at for at, one in enumerate(encoded) for _ in one.documents]
        documents = [text for one in encoded for text in one.documents]
        queries = [one.query for one in encoded]
        width = max(len(one.known) for one in encoded)
        scores = [score for one in encoded for score in (one.scores or (float("nan"),) * len(one.documents))]
        return {
            **_padded(texts, self.tokenizer.pad),
            "queries": _longs([-1 if q is None or not len(q.ids) else places[_same(q)] for q in queries]),
            "documents": _longs([places[_same(text)] for text in documents]),
            "owner": _longs(owner),
            "labels": torch.tensor([x for one in encoded for x in one.labels if one.documents], dtype=torch.float32),
            "scores": torch.tensor(scores) if any(one.scores for one in encoded) else None,
            "query_keys": _longs([-1 if query is None else query.key for query in queries]),
            "document_keys": _longs([text.key for text in documents]),
            "known": _longs([[*one.known, *(-1,) * (width - len(one.known))] for one in encoded]),
            "classes": _longs([int(one.labels[0]) if one.shape in CLASSES else -1 for one in encoded]),
            "shape": encoded[0].shape,
            "source": encoded[0].source,
            "where": [one.where for one in encoded],
            "fields": [one.fields for one in encoded],
            "cuts": [text.cut for text in texts],
        }

    def show(self, data: dict[str, Any], row: int) -> Shown:
        """Query and documents, each with its label; what is similar to the query counts as carrying loss."""
        own = (data["owner"] == row).nonzero()[:, 0].tolist()
        labels = [float(data["labels"][at]) for at in own]
        facts = {"documents": str(len(own)), "data set": self.sources[data["source"]].label}
        tokens: list[tuple[str, bool]] = []
        query = int(data["queries"][row])
        if query >= 0:
            tokens += [("query ", False), *self._shown(data, query, True)]
        for at, label in zip(own, labels, strict=True):
            teacher = "" if data["scores"] is None else f", teacher {float(data['scores'][at]):g}"
            tokens += [(f"\ndocument, label {label:g}{teacher} ", False)]
            tokens += self._shown(data, int(data["documents"][at]), label > 0)
        known = known_positives(data["document_keys"], data["known"][row : row + 1])[0]
        if masked := int((known & (data["owner"] != row)).sum()):
            facts["masked"] = f"{masked} documents of other rows are relevant to it too, so they are no negatives"
        if not own:
            facts["class"] = str(int(data["classes"][row]))
        return Shown(data["where"][row], facts, tokens)

    def _shown(self, data: dict[str, Any], text: int, carries: bool) -> list[tuple[str, bool]]:
        ids = data["input_ids"][text][data["attention_mask"][text].bool()].tolist()
        cut = data["cuts"][text]
        marks = [(f" [{cut} tokens cut]", False)] if cut else []
        return [*((piece, carries) for piece in self.tokenizer.pieces(ids)), *marks]


def _same(text: Text) -> tuple[bytes, int, int]:
    """What two texts must share to be run once."""
    return text.ids.tobytes(), text.prompt, text.second


def _unique(texts: Sequence[Text]) -> tuple[list[Text], dict[tuple[bytes, int, int], int]]:
    """Texts that differ, the longest first, and the place of each."""
    differing = {_same(text): text for text in texts}
    found = dict(sorted(differing.items(), key=lambda item: -len(item[1].ids)))
    return list(found.values()), {same: place for place, same in enumerate(found)}


def _padded(texts: Sequence[Text], pad: int) -> dict[str, Tensor | None]:
    lengths = np.array([len(text.ids) for text in texts])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad, dtype=np.int64)
    ids[mask] = np.concatenate([text.ids for text in texts])
    seconds = np.array([text.second for text in texts])
    types = mask & (seconds[:, None] > 0) & (np.arange(mask.shape[1]) >= seconds[:, None])
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "token_type_ids": torch.from_numpy(types.astype(np.int64)) if seconds.any() else None,
        "prompt_lengths": _longs([text.prompt for text in texts]) if any(text.prompt for text in texts) else None,
    }


def _longs(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
