"""Rows that compare answers to one prompt, and rows that judge one answer.

| keys | what |
| --- | --- |
| `chosen`, `rejected` (`prompt`, `margin`) | two answers, the better one first |
| `ranked` (`prompt`) | answers from the best to the worst |
| `prompt`, `completion`, `label` | one answer: whether it is good, its number, or its class |

Answers are texts or lists of messages, as in `shapes`; `tools` and `chat_template_kwargs` hold for all. Without
`prompt`, or with one that the answers repeat, it is what they have in common: their first messages, or the words with
which their texts begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...common.data.rows import Cursor, Row
from ...common.data.sources import rows
from ...common.errors import BadExample
from . import shapes
from .conversation import Conversation, Text
from .messages import bad, listed, parsed

_USED = ("prompt", "chosen", "rejected", "ranked", "completion", "label", "margin", "tools", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Preference:
    """Answers to one prompt, from the best to the worst.

    Args:
        answers: each with the prompt, whose messages carry no loss.
        prompt: how many messages the prompt has, if they are conversations.
        where: place in the source, `file:line`.
        source: name of the data set in the recipe.
        margin: by how much the first is better, if the row says.
        extra: all other fields of the row, usable as slices.
        label: of a judged answer: the row's.
    """

    answers: tuple[Conversation | Text, ...]
    prompt: int
    where: str
    source: str = ""
    margin: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    label: Any = None


def items(
    path: str, split: str | None = None, source: str = "", cursor: Cursor | None = None, judged: bool = False
) -> Iterator[Preference | BadExample]:
    """Examples of a source in its own order; each row gives one, or a BadExample.

    Args:
        path: file, folder or data set on the hub.
        split: split of a data set.
        source: name of the data set in the recipe.
        cursor: of a stream.
        judged: whether rows judge one answer; else they compare several.
    """
    for row in rows(path, split=split, source=source, cursor=cursor):
        if isinstance(row, BadExample):
            yield row
            continue
        try:
            yield judgement(row) if judged else preference(row)
        except BadExample as error:
            yield error.with_traceback(None)


def preference(row: Row) -> Preference:
    """The answers that a row compares.

    Raises:
        BadExample: `unknown_shape`, `ambiguous_shape`, `ambiguous_prompt`, `equal_answers`, `bad_margin`, and those of
            `shapes.item`.
    """
    fields, where = row.fields, row.where
    pair = all(fields.get(key) is not None for key in ("chosen", "rejected"))
    if pair == (fields.get("ranked") is not None):
        reason = "ambiguous_shape" if pair else "unknown_shape"
        wanted = "chosen and rejected, or ranked"
        raise bad(where, reason, "the row compares no answers as is known", ", ".join(map(str, fields)), wanted)
    given = [fields["chosen"], fields["rejected"]] if pair else listed(fields["ranked"], where, "ranked")
    if len(given) < 2:
        raise bad(where, "one_answer", "'ranked' has less than two answers", given, "at least two")
    given = [parsed(one, where, "answer", lenient=True) for one in given]
    if any(one in given[:at] for at, one in enumerate(given)):
        raise bad(where, "equal_answers", "two answers are the same", given[-1], "answers that differ")
    prompt, given = _split(row, given)
    answers = tuple(_answer(row, prompt, one) for one in given)
    return Preference(answers, _length(prompt), where, row.source, _margin(row), _extra(row))


def judgement(row: Row) -> Preference:
    """The one answer that a row judges.

    Raises:
        BadExample: `missing_field`, and those of `shapes.item`.
    """
    missing = [key for key in ("prompt", "completion", "label") if row.fields.get(key) is None]
    if missing:
        keys = ", ".join(map(str, row.fields))
        raise bad(row.where, "missing_field", f"the row lacks {', '.join(missing)}", keys, "prompt, completion, label")
    prompt = parsed(row.fields["prompt"], row.where, "prompt", lenient=True)
    answer = _answer(row, prompt, row.fields["completion"])
    return Preference((answer,), _length(prompt), row.where, row.source, 0.0, _extra(row), row.fields["label"])


def _split(row: Row, answers: list[Any]) -> tuple[Any, list[Any]]:
    """The prompt, and the answers without it."""
    prompt = parsed(row.fields.get("prompt"), row.where, "prompt", lenient=True)
    if prompt is not None and not (isinstance(prompt, str) and all(isinstance(one, list) for one in answers)):
        return prompt, answers
    if all(isinstance(one, list) for one in answers):
        same = _common(answers)
        if prompt is None or prompt in [_content(one) for one in answers[0][:same]]:
            return answers[0][:same], [one[same:] for one in answers]
        if same:
            raise bad(row.where, "ambiguous_prompt", "the answers begin with another prompt", prompt, "one prompt")
        return prompt, answers
    if not all(isinstance(one, str) for one in answers):
        raise bad(row.where, "bad_content", "the answers are of different kinds", answers, "texts, or message lists")
    first, last = min(answers), max(answers)  # what these have in common, all have
    alike = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    words = re.match(r".*(?=\s)", first[:alike], re.DOTALL)  # whole ones
    same = words.end() if words else 0
    return answers[0][:same] or None, [one[same:] for one in answers]


def _common(answers: Sequence[list[Any]]) -> int:
    """Messages with which all begin; what follows is the answer, an assistant's if possible."""
    first, most = answers[0], min(map(len, answers))
    same = next((at for at in range(most) if any(one[at] != first[at] for one in answers[1:])), most)
    return min(same, most - 1) if same == most else same


def _answer(row: Row, prompt: Any, answer: Any) -> Conversation | Text:
    """Prompt and answer as one example; only the answer carries loss."""
    kept = {key: row.fields.get(key) for key in ("tools", "chat_template_kwargs")}
    if prompt is None and isinstance(answer, str):
        return shapes.item(replace(row, fields={"text": answer}), "text")
    asked = [] if prompt is None else prompt
    return shapes.item(replace(row, fields={**kept, "prompt": asked, "completion": answer}), "prompt_completion")


def _content(one: Any) -> Any:
    return one.get("content", one.get("value")) if isinstance(one, Mapping) else None


def _length(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, list) else 1


def _margin(row: Row) -> float:
    given = row.fields.get("margin")
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise bad(row.where, "bad_margin", "'margin' is not a number", given, "a number")
    return float(given)


def _extra(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.fields.items() if key not in _USED}
