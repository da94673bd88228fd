"""Pairs and ranked lists of answers as tokens that share their prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import torch

from ....common.data.processing import Shown
from ....common.data.rows import Cursor
from ....common.errors import BadExample, LuthierError
from ....common.recipe import Source
from .. import doubts, preferences
from ..batch import Group, join_groups
from ..chat import encode_plain
from ..conversation import Conversation, Text
from ..generate import Prompt
from ..pairing import fit_together
from ..preferences import Preference
from ..processing import NOTHING, counted, pieces
from ..sft.processing import ChatProcessing
from ..tokens import Document, Tokens


@dataclass(frozen=True, slots=True)
class Compared:
    """Answers to one prompt as they are trained on.

    Args:
        group: the answers, from the best to the worst.
        where: place in the source.
        fields: what it may be sliced by; only in an evaluation.
        notes: what was cut from it, to be counted.
        prompt: what the model is asked; only in an evaluation by generation.
        margin: by how much the first is better, if the row says.
        label: of a judged answer.
    """

    group: Group
    where: str
    fields: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    notes: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    prompt: Prompt | None = None
    margin: float = 0.0
    label: Any = None


class PreferenceProcessing(ChatProcessing):
    """The data path of a recipe whose rows compare or judge answers."""

    judged = False
    """Whether rows judge one answer; else they compare several."""

    def read(self, source: Source) -> Iterator[Any]:
        return preferences.items(source.path, source.split, source.label, judged=self.judged)

    def stream(self, source: Source, cursor: Cursor) -> Iterator[Any]:
        return preferences.items(source.path, source.split, source.label, cursor, self.judged)

    def examine(self, example: Any, training: bool) -> list[Any]:
        made: Preference = example
        tokens, taken = fit_together(made, self.encoded, self.limit)
        said = [one.ids.tolist() for one in tokens]
        if any(one in said[:at] for at, one in enumerate(said)):
            raise BadExample("equal_answers", "two answers have the same tokens", where=made.where)
        group, noted = Group.of([Document.of(one) for one in tokens]), counted(tokens[0], taken) or NOTHING
        label = self.label_of(made)
        if training:
            return [Compared(group, made.where, notes=noted, margin=made.margin, label=label)]
        fields = {"source": made.source, **made.extra}
        fields = {name: fields[name] for name in self.recipe.evaluate.slices if fields.get(name) is not None}
        prompt = self.prompt_of(made.answers[0], tokens[0], taken)
        return [Compared(group, made.where, fields, noted, prompt, made.margin, label)]

    def label_of(self, item: Preference) -> Any:
        """The label of a judged answer, checked. Raises BadExample."""
        return item.label

    def encoded(self, item: Conversation | Text) -> Tokens:
        """The tokens of a prompt with one answer, whatever their length. Raises BadExample."""
        if isinstance(item, Text):
            if item.prompt is None or self.recipe.data.plain:
                return encode_plain(self.tokenizer, item)
            item = item.as_conversation()
        return self.chat.encode(item)

    def contents(self, example: Any) -> Iterable[Hashable]:
        return (example.group.document(0).ids.tobytes(),)

    def doubts(self, examples: Sequence[Any]) -> Iterable[LuthierError]:
        yield from super().doubts(examples)
        yield from doubts.of_labels([one.label for one in examples])

    def _answers(self, examples: Sequence[Any]) -> Iterable[Document]:
        return (one.group.document(0) for one in examples if "answer tokens cut" not in one.notes)

    def units(self, example: Any) -> Sequence[Hashable]:
        found: list[Hashable] = example.group.document(0).ids.tolist()
        return found

    def cost(self, example: Any) -> float:
        return float(len(example.group))

    def collate(self, encoded: Sequence[Any], generator: np.random.Generator | None) -> dict[str, Any]:
        """The tensors of `batch.join_groups`; `pairs` [P, 2] int64: numbers of a better and of a worse answer, all that
        the examples have; `margins` [P]: of the rows; and lists of what each example is: `answers` and `pairs_of` (how
        many it has), `groups`, `fields`, `where`, `prompts`, `labels`."""
        answers = [len(one.group.rests) for one in encoded]
        begins = np.cumsum([0, *answers]).tolist()
        pairs = [
            [(begin + one, begin + other) for one, other in combinations(range(number), 2)]
            for begin, number in zip(begins, answers, strict=False)
        ]
        margins = [one.margin for one, of in zip(encoded, pairs, strict=True) for _ in of]
        return {
            **join_groups([one.group for one in encoded]),
            "pairs": torch.tensor([pair for of in pairs for pair in of], dtype=torch.int64).reshape(-1, 2),
            "margins": torch.tensor(margins, dtype=torch.float32),
            "answers": answers,
            "pairs_of": [len(of) for of in pairs],
            "groups": [one.group for one in encoded],
            "fields": [one.fields for one in encoded],
            "where": [one.where for one in encoded],
            "prompts": [one.prompt for one in encoded],
            "labels_of": [one.label for one in encoded],
        }

    def show(self, data: dict[str, Any], row: int) -> Shown:
        group: Group = data["groups"][row]
        tokens: list[tuple[str, bool]] = []
        begins: list[tuple[int, str]] = []
        names = ("begins all answers", *(f"answer {number}" for number in range(1, len(group.rests) + 1)))
        for name, part in zip(names, (group.shared, *group.rests), strict=True):
            begins += [(len(tokens), name)] if len(part) else []
            tokens += zip(pieces(self.tokenizer, part.ids.tolist()), part.trained.tolist(), strict=True)
        facts = {
            "tokens": str(len(group)),
            "shared": str(len(group.shared)),
            "answers": " ".join(str(len(rest)) for rest in group.rests),
        }
        return Shown(data["where"][row], facts, tokens, parts=tuple(begins))
