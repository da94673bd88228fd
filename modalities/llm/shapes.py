"""Rows of the shapes in use, told apart by their keys: `shape_of` says which one a row has, `item` makes the example.

| shape | keys | example |
| --- | --- | --- |
| `text` | `text` | Text |
| `messages` | `messages` (`tools`) | Conversation |
| `prompt_completion` | `prompt`, `completion` (`tools`) | Text if they are strings, Conversation if message lists |
| `alpaca` | `instruction`, `output` (`input`, `system`, `history`) | Conversation |
| `sharegpt` | `conversations` (`system`, `tools`) | Conversation |

A row that fits two shapes is refused, unless the shape is given. Lists and objects may be JSON text, as tables without
types have them. All fields that are not used stay in `extra`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...common.data.rows import Cursor, Row
from ...common.data.sources import rows
from ...common.errors import BadExample
from .conversation import Conversation, Message, Text
from .messages import bad, listed, message, parsed, string, tool_schemas

Item = Conversation | Text

SHAPES: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
"""The keys that a row of each shape must have."""

_OPTIONAL = {
    "text": (),
    "messages": ("tools", "chat_template_kwargs"),
    "prompt_completion": ("tools", "chat_template_kwargs"),
    "alpaca": ("input", "system", "history"),
    "sharegpt": ("system", "tools", "chat_template_kwargs"),
}


def items(
    path: str,
    split: str | None = None,
    source: str = "",
    shape: str | None = None,
    cursor: Cursor | None = None,
) -> Iterator[Conversation | Text | BadExample]:
    """Examples of a source in its own order; each row gives one, or a BadExample, so counts add up.

    Args:
        path: file, folder or data set on the hub (see `common.data.sources.rows`).
        split: split of a data set.
        source: name of the data set in the recipe.
        shape: one of `SHAPES`; None: found for each row.
        cursor: of a stream (see `rows`).
    """
    for row in rows(path, split=split, source=source, cursor=cursor):
        if isinstance(row, BadExample):
            yield row
            continue
        try:
            yield item(row, shape)
        except BadExample as error:
            yield error.with_traceback(None)  # a traceback would keep the row in memory


def shape_of(row: Row) -> str:
    """The shape of a row: the one whose keys it has; if several, the one whose keys are filled.

    Raises:
        BadExample: `unknown_shape` or `ambiguous_shape`.
    """
    present = [name for name, keys in SHAPES.items() if all(row.fields.get(key) is not None for key in keys)]
    if not present:
        expected = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in SHAPES.items())
        raise bad(row.where, "unknown_shape", "the row has no known shape", _keys(row), expected)
    filled = [name for name in present if not any(_is_blank(row.fields[key]) for key in SHAPES[name])] or present
    if len(filled) > 1:
        given = "; ".join(f"{name}: {', '.join(SHAPES[name])}" for name in filled)
        raise BadExample(
            "ambiguous_shape",
            "the row fits more than one shape",
            where=row.where,
            given=given,
            expected="one",
            do="name the shape in the recipe, or leave out the other fields",
        )
    return filled[0]


def _keys(row: Row) -> str:
    return f"the keys {', '.join(map(str, row.fields))}"


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


def item(row: Row, shape: str | None = None) -> Item:
    """The example of a row.

    Reasons of bad examples: `unknown_shape`, `ambiguous_shape`, `missing_field`, `bad_json`, `bad_content`, `not_text`,
    `not_unicode`, `unknown_role`, `bad_tool_call`, `bad_tools`, `bad_arguments`, `bad_flag`, `empty_text`,
    `empty_message`, `empty_answer`, `no_messages`, `no_assistant`.

    Raises:
        BadExample: the row can't be used, for one of these reasons.
    """
    name = shape or shape_of(row)
    missing = [key for key in SHAPES[name] if row.fields.get(key) is None]
    if missing:
        raise bad(row.where, "missing_field", f"a row of shape {name} lacks {', '.join(missing)}", _keys(row), missing)
    return _MAKERS[name](row)


def _extra(row: Row, shape: str) -> dict[str, Any]:
    used = {*SHAPES[shape], *_OPTIONAL[shape]}
    return {key: value for key, value in row.fields.items() if key not in used}


def _text(row: Row) -> Text:
    text = string(row.fields["text"], row.where, "text", reason="bad_content")
    if not text.strip():
        raise bad(row.where, "empty_text", "the text is empty", text, "a text")
    return Text(text, row.where, row.source, extra=_extra(row, "text"))


def _messages(row: Row) -> Conversation:
    return _conversation(row, "messages", _list_of(row, row.fields["messages"], "messages"))


def _prompt_completion(row: Row) -> Item:
    prompt, completion = (parsed(row.fields[key], row.where, key, lenient=True) for key in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt = string(prompt, row.where, "prompt", reason="bad_content")
        if not string(completion, row.where, "completion", reason="bad_content").strip():
            raise bad(row.where, "empty_answer", "'completion' is empty", completion, "a text")
        return Text(completion, row.where, row.source, prompt, _extra(row, "prompt_completion"))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    before = [_untrained(one) for one in _list_of(row, prompt, "prompt")]
    return _conversation(row, "prompt_completion", [*before, *_list_of(row, completion, "completion")])


def _untrained(one: Message) -> Message:
    """A message of a prompt: it carries no loss, also if an assistant says it."""
    return replace(one, train=False)


def _alpaca(row: Row) -> Conversation:
    fields, where = row.fields, row.where
    said = {key: string(fields.get(key) or "", where, key) for key in ("instruction", "input", "output", "system")}
    found = [Message("system", said["system"])] if said["system"].strip() else []
    for pair in listed(fields.get("history") or [], where, "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise bad(where, "bad_content", "'history' is not a list of pairs", pair, "[question, answer]")
        asked, answered = (string(part, where, "history") for part in pair)
        found += [Message("user", asked), Message("assistant", answered)]
    asked = "\n".join(part for part in (said["instruction"], said["input"]) if part.strip())
    found += [Message("user", asked), Message("assistant", said["output"])]
    return _conversation(row, "alpaca", found)


def _sharegpt(row: Row) -> Conversation:
    found = _list_of(row, row.fields["conversations"], "conversations")
    system = string(row.fields.get("system") or "", row.where, "system")
    if system.strip() and not (found and found[0].role == "system"):
        found = [Message("system", system), *found]
    return _conversation(row, "sharegpt", found)


_MAKERS: dict[str, Callable[[Row], Item]] = {
    "text": _text,
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
}


def _list_of(row: Row, value: Any, key: str) -> list[Message]:
    return [message(one, f"{key}[{index}]", row.where) for index, one in enumerate(listed(value, row.where, key))]


def _conversation(row: Row, shape: str, messages: Iterable[Message]) -> Conversation:
    """The conversation of checked messages: there is an answer, and none that should be learned is empty."""
    found, optional = tuple(messages), _OPTIONAL[shape]
    if not found:
        raise bad(row.where, "no_messages", "the conversation has no message", "none", "at least one")
    for index, one in enumerate(found):
        _check_filled(one, index, row.where)
    if not any(one.role == "assistant" or one.train for one in found):
        roles = ", ".join(one.role for one in found)
        raise bad(row.where, "no_assistant", "the conversation has no assistant's message", roles, "an answer")
    tools = tool_schemas(row.fields.get("tools"), row.where) if "tools" in optional else ()
    given = row.fields.get("chat_template_kwargs") if "chat_template_kwargs" in optional else None
    variables = parsed({} if given is None else given, row.where, "chat_template_kwargs")
    if not isinstance(variables, Mapping):
        raise bad(row.where, "bad_content", "'chat_template_kwargs' is not an object", variables, "an object")
    return Conversation(found, row.where, row.source, tools, variables, _extra(row, shape))


def _check_filled(one: Message, index: int, where: str) -> None:
    """Tools may answer nothing; a message that is not learned from may be an assistant's silence."""
    if one.tool_calls or one.role == "tool" or (one.content is not None and one.content.strip()):
        return
    if one.role != "assistant":
        raise bad(where, "empty_message", f"message {index} ({one.role}) is empty", one.content, "a text")
    if one.train is not False:
        raise bad(where, "empty_answer", f"message {index} (assistant) is empty", one.content, "an answer")
