"""Rows as prompts: what the model is asked, and what its answers are judged by."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ....common.data.plan import Plan
from ....common.data.processing import Processing, Schedule, Shown
from ....common.data.rows import Row
from ....common.data.sources import rows
from ....common.errors import BadExample
from ....common.recipe import Source
from ..chat import Chat, plain_prompt
from ..conversation import Conversation, Message, Text
from ..messages import bad, listed, message, parsed, string, tool_schemas
from ..model import load_tokenizer
from ..processing import NOTHING, pieces
from .plan import RolloutPlan

_USED = ("prompt", "messages", "tools", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt.

    Args:
        item: what is asked; of a text its prompt alone; None: an environment makes it.
        row: the further fields of the row.
        where: place in the source, `file:line`.
        source: name of the data set in the recipe.
    """

    item: Conversation | Text | None
    row: Mapping[str, Any]
    where: str
    source: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as the model is given it.

    Args:
        ids: [T] int32; none where an environment makes the prompt.
        prompt: the messages or the text, for the rewards.
        row: the further fields of the row, for the rewards.
        where: place in the source.
        fields: what it may be sliced by; only in an evaluation.
    """

    ids: np.ndarray
    prompt: str | Sequence[Mapping[str, Any]]
    row: Mapping[str, Any]
    where: str
    fields: Mapping[str, Any] = field(default_factory=lambda: NOTHING)


def question(row: Row) -> Question:
    """The prompt of a row.

    Raises:
        BadExample: `unknown_shape`, `ambiguous_shape`, `no_messages`, `no_question`, and those of `messages`.
    """
    fields, where = row.fields, row.where
    prompt, messages = (parsed(fields.get(key), where, key, lenient=True) for key in ("prompt", "messages"))
    if (prompt is None) == (messages is None):
        reason = "unknown_shape" if prompt is None else "ambiguous_shape"
        raise bad(where, reason, "the row has no prompt as is known", list(fields), "either prompt or messages")
    rest = {key: value for key, value in fields.items() if key not in _USED}
    if isinstance(prompt, str):
        if not string(prompt, where, "prompt").strip():
            raise bad(where, "no_question", "'prompt' is empty", prompt, "a text")
        return Question(Text("", where, row.source, prompt), rest, where, row.source)
    key = "prompt" if messages is None else "messages"
    found = [message(one, f"{key}[{at}]", where) for at, one in enumerate(listed(fields[key], where, key))]
    if messages is not None and found and found[-1].role == "assistant":
        rest = {"answer": found[-1].content, **rest}
        found = found[:-1]
    if not found or found[-1].role == "assistant":
        said = found[-1].role if found else "none"
        raise bad(where, "no_question", f"{key!r} asks nothing", said, "a last message of a user or a tool")
    given = fields.get("chat_template_kwargs")
    variables = parsed({} if given is None else given, where, "chat_template_kwargs")
    tools = tool_schemas(fields.get("tools"), where)
    item = Conversation(tuple(found), where, row.source, tools, variables)
    return Question(item, rest, where, row.source)


def situation(row: Row) -> Question:
    """The row of which an environment makes the prompt."""
    return Question(None, row.fields, row.where, row.source)


class PromptProcessing(Processing[Any]):
    """The data path of a recipe whose rows are prompts.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model, whose tokenizer is used.
    """

    unit = "tokens"
    joined = True

    def __init__(self, recipe: Any, weights: Path | None = None):
        self.recipe = recipe
        self.tokenizer = load_tokenizer(recipe.model, weights, recipe.data.chat_template)

    @cached_property
    def chat(self) -> Chat:
        """Made when the first conversation comes: plain text needs no template."""
        return Chat(self.tokenizer, control=self.recipe.data.control_tokens)

    def terminators(self) -> tuple[int, ...]:
        """Ids at which generation is to stop."""
        if self.tokenizer.chat_template and not self.recipe.data.plain:
            return self.chat.terminators()
        return () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)

    # ------------------------------------------------------------------ examples

    def read(self, source: Source) -> Iterator[Question | BadExample]:
        for row in rows(source.path, split=source.split, source=source.label):
            if isinstance(row, BadExample):
                yield row
                continue
            try:
                yield question(row) if self.recipe.rollout.environment is None else situation(row)
            except BadExample as error:
                yield error.with_traceback(None)

    def examine(self, example: Question, training: bool) -> list[Asked]:
        if example.item is None:
            return [self._ready(example, np.zeros(0, np.int32), "", training)]
        ids, prompt = self._asked(example.item)
        most = self.recipe.data.max_length - self.recipe.rollout.max_new_tokens
        if not 1 <= len(ids) <= most:
            raise BadExample(
                "too_long" if len(ids) else "no_question",
                "the prompt leaves no room for a completion" if len(ids) else "the prompt has no token",
                where=example.where,
                given=f"{len(ids)} tokens",
                expected=f"1 to {most}: data.max_length without rollout.max_new_tokens",
            )
        return [self._ready(example, ids.astype(np.int32), prompt, training)]

    def _ready(
        self, example: Question, ids: np.ndarray, prompt: str | Sequence[Mapping[str, Any]], training: bool
    ) -> Asked:
        found = Asked(ids, prompt, example.row, example.where)
        if training:
            return found
        fields = {"source": example.source, **example.row}
        kept = {name: fields[name] for name in self.recipe.evaluate.slices if fields.get(name) is not None}
        return replace(found, fields=kept)

    def _asked(self, item: Conversation | Text) -> tuple[np.ndarray, str | list[dict[str, Any]]]:
        if isinstance(item, Text):
            text = item.prompt or ""
            if self.recipe.data.plain:
                return plain_prompt(self.tokenizer, item), text
            item = Conversation((Message("user", text),), item.where, item.source)
            return self.chat.asked(item), text
        return self.chat.asked(item), [one.as_dict() for one in item.messages]

    def cost(self, example: Asked) -> float:
        """Most tokens of the prompt with all of its completions."""
        return float(len(example.ids) + self.recipe.rollout.num_generations * self.recipe.most_tokens)

    def contents(self, example: Asked) -> Iterable[Hashable]:
        return (example.ids.tobytes(),) if len(example.ids) else ()

    def units(self, example: Asked) -> Sequence[Hashable]:
        found: list[Hashable] = example.ids.tolist()
        return found

    def name(self, example: Asked) -> str:
        return example.where

    # ------------------------------------------------------------------ batches

    def encode(self, example: Asked, generator: np.random.Generator | None) -> Asked:
        return example

    def collate(self, encoded: Sequence[Asked], generator: np.random.Generator | None) -> dict[str, Any]:
        """`prompts`: the examples; their completions come when the training is there."""
        return {"prompts": list(encoded)}

    def show(self, data: dict[str, Any], row: int) -> Shown:
        one: Asked = data["prompts"][row]
        if not len(one.ids):
            return Shown(one.where, {"row": f"{dict(one.row)!s:.500}"}, [])
        found = pieces(self.tokenizer, one.ids.tolist())
        return Shown(one.where, {"tokens": str(len(one.ids))}, [(piece, False) for piece in found])

    def schedule(self, plan: Plan) -> Schedule:
        """The batches of rollouts; with several passes the last rollout is filled up from the next epoch."""
        section, steps = self.recipe.rollout, self.recipe.train.steps
        size = section.steps * plan.per_step
        if section.iterations == 1:
            return RolloutPlan(plan, size, 1)
        wanted = plan.steps if steps is None else math.ceil(steps / section.iterations)
        whole = Plan(
            plan.costs.tolist(),
            plan.bounds,
            seed=plan.seed,
            ranks=plan.ranks,
            per_step=plan.per_step,
            steps=math.ceil(wanted / section.steps) * section.steps,
            weights=plan.weights.tolist(),
            groups=plan.groups.tolist(),
        )
        return RolloutPlan(whole, size, section.iterations, steps)
