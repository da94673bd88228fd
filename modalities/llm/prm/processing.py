"""Solutions in steps as tokens, and where each step's score stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ....common.data.rows import Cursor, Row
from ....common.data.sources import rows
from ....common.errors import BadExample, LuthierError
from ....common.recipe import Source
from .. import doubts, shapes
from ..chat import encode_text, plain_prompt
from ..conversation import Conversation, Text
from ..lengths import cut
from ..messages import bad, listed
from ..processing import NOTHING, Encoded, counted
from ..sft.processing import ChatProcessing
from ..tokens import Document, Tokens

_USED = ("prompt", "completions", "labels", "tools", "chat_template_kwargs")


@dataclass(frozen=True)
class Solution:
    """A row: a solution of a task, in steps.

    Args:
        whole: the prompt, and all steps as one answer.
        steps: texts.
        labels: whether each is right.
        extra: all other fields of the row, usable as slices.
    """

    whole: Conversation | Text
    steps: tuple[str, ...]
    labels: tuple[bool, ...]
    extra: Mapping[str, Any]

    @property
    def where(self) -> str:
        """Place in the source, `file:line`."""
        return self.whole.where


@dataclass(frozen=True, slots=True)
class Judged(Encoded):
    """A solution as it is trained on; its tokens that carry loss are the last ones of the separators.

    Args:
        labels: whether each step is right.
    """

    labels: tuple[bool, ...] = ()


def solution(row: Row) -> Solution:
    """The solution of a row: `prompt`, a text or messages; `completions`, the steps; `labels`, true or false for each.

    Raises:
        BadExample: `missing_field`, `empty_step`, `bad_label`, and those of `shapes.item`.
    """
    missing = [key for key in ("prompt", "completions", "labels") if row.fields.get(key) is None]
    if missing:
        keys = ", ".join(map(str, row.fields))
        expected = "prompt, completions, labels"
        raise bad(row.where, "missing_field", f"the row lacks {', '.join(missing)}", keys, expected)
    steps = listed(row.fields["completions"], row.where, "completions")
    labels = listed(row.fields["labels"], row.where, "labels")
    if not steps or not all(isinstance(one, str) and one.strip() for one in steps):
        raise bad(row.where, "empty_step", "'completions' is no list of texts", steps, "a text for each step")
    if len(labels) != len(steps) or any(one not in (True, False) for one in labels):  # 1 and 0 too
        raise bad(row.where, "bad_label", "'labels' can't be used", labels, f"true or false for {len(steps)} steps")
    kept = {key: row.fields.get(key) for key in ("tools", "chat_template_kwargs")}
    fields = {**kept, "prompt": row.fields["prompt"], "completion": "\n".join(steps)}
    whole = shapes.item(replace(row, fields=fields), "prompt_completion")
    extra = {key: value for key, value in row.fields.items() if key not in _USED}
    return Solution(whole, tuple(steps), tuple(map(bool, labels)), extra)


class StepProcessing(ChatProcessing):
    """The data path of a recipe."""

    def read(self, source: Source) -> Iterator[Any]:
        return self._items(source, None)

    def stream(self, source: Source, cursor: Cursor) -> Iterator[Any]:
        return self._items(source, cursor)

    @staticmethod
    def _items(source: Source, cursor: Cursor | None) -> Iterator[Solution | BadExample]:
        for row in rows(source.path, split=source.split, source=source.label, cursor=cursor):
            if isinstance(row, BadExample):
                yield row
                continue
            try:
                yield solution(row)
            except BadExample as error:
                yield error.with_traceback(None)

    def examine(self, example: Any, training: bool) -> list[Encoded]:
        made: Solution = example
        prompt = self._prompt(made.whole)
        ids, ends = self._steps(made)
        tokens = Tokens(
            np.concatenate([prompt.ids, ids]),
            np.concatenate([np.zeros(len(prompt), dtype=bool), np.ones(len(ids), dtype=bool)]),
            np.concatenate([prompt.cuttable, np.zeros(len(ids), dtype=bool)]),
        )
        tokens, taken = cut(tokens, self.limit, made.where)  # the prompt before the steps
        places = ends + len(prompt) - taken.prompt
        places = places[places < len(tokens)]
        if not len(places):
            raise BadExample("no_target", "no step is left to be judged", where=made.where)
        scored = np.zeros(len(tokens), dtype=bool)
        scored[places] = True
        documents = (Document(tokens.ids.astype(np.int32), scored),)
        fields = {} if training else {"source": made.whole.source, **made.extra}
        fields = {name: fields[name] for name in self.recipe.evaluate.slices if fields.get(name) is not None}
        noted = counted(tokens, taken) or NOTHING
        return [Judged(documents, made.where, fields, noted, labels=made.labels[: len(places)])]

    def _prompt(self, whole: Conversation | Text) -> Tokens:
        """What stands before the first step."""
        if isinstance(whole, Text) and (self.recipe.data.plain or not self.tokenizer.chat_template):
            ids = plain_prompt(self.tokenizer, whole)
            begun = len(ids) - len(encode_text(self.tokenizer, whole.prompt or "")[0])
            return Tokens(ids, np.zeros(len(ids), dtype=bool), np.arange(len(ids)) >= begun)
        conversation = whole.as_conversation() if isinstance(whole, Text) else whole
        tokens = self.chat.encode(conversation)
        begin = int(np.argmax(tokens.trained))
        return tokens.at(np.arange(begin))

    def _steps(self, made: Solution) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all steps, each with its separator; [S] places of the separators' last tokens). No token crosses from
        a step into its separator, so that a separator has the same tokens always."""
        separator = self.recipe.task.step_separator
        pieces = [piece for step in made.steps for piece in (step, separator)]
        bounds = list(accumulate(map(len, pieces)))
        ids, starts = encode_text(self.tokenizer, "".join(pieces), bounds[:-1])
        places = np.searchsorted(starts, bounds[1::2], side="left") - 1
        if (starts[places] < np.array(bounds[::2])).any():
            problem = "task.step_separator has no token of its own"
            raise BadExample("no_separator", problem, where=made.where, given=repr(separator))
        return ids, places

    def doubts(self, examples: Sequence[Any]) -> Iterable[LuthierError]:
        return doubts.of_labels([label for one in examples for label in one.labels])

    def collate(self, encoded: Sequence[Any], generator: np.random.Generator | None) -> dict[str, Any]:
        """Also `steps`, `step_labels` [S] int64: places of all steps' scores, and whether they are right; `steps_of`:
        how many each example has."""
        places, at = [], 0
        for one in encoded:
            places.append(at + np.flatnonzero(one.documents[0].trained))
            at += len(one)
        labels = [label for one in encoded for label in one.labels]
        return {
            **super().collate(encoded, generator),
            "steps": torch.from_numpy(np.concatenate(places)),
            "step_labels": torch.tensor(labels, dtype=torch.int64),
            "steps_of": [len(one.labels) for one in encoded],
        }
