"""One message of a row, in the forms in use: OpenAI's (role, content, tool_calls) and ShareGPT's (from, value)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...common.errors import BadExample
from .conversation import ROLES, Message, ToolCall

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_SAME_ROLE = {"developer": "system", "function": "tool"}  # OpenAI's newer and older names
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")


def bad(where: str, reason: str, problem: str, given: object, expected: object) -> BadExample:
    """A BadExample of a row; long values are shortened."""
    shown = given if isinstance(given, str) else repr(given)
    shown = shown if len(shown) <= 200 else f"{shown[:200]} ..."
    return BadExample(reason, problem, where=where, given=shown, expected=expected, do="correct the row")


def string(value: Any, where: str, key: str, reason: str = "bad_content") -> str:
    """A value that must be text in valid Unicode."""
    if not isinstance(value, str):
        raise bad(where, reason, f"{key!r} is not text", value, "a string")
    if _SURROGATE.search(value):
        raise bad(where, "not_unicode", f"{key!r} holds half of a character", ascii(value), "valid Unicode")
    return value


def parsed(value: Any, where: str, key: str, lenient: bool = False) -> Any:
    """A list or object, also from its JSON text.

    Args:
        lenient: text that is not a JSON list is left as it is.
    """
    if not isinstance(value, str) or (lenient and not value.lstrip().startswith("[{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if lenient:
            return value
        raise bad(where, "bad_json", f"{key!r} is not valid JSON: {error}", value, "a list or an object") from None


def listed(value: Any, where: str, key: str) -> list[Any]:
    """A list, also from its JSON text."""
    found = parsed(value, where, key)
    if not isinstance(found, list | tuple):
        raise bad(where, "bad_content", f"{key!r} is not a list", value, "a list")
    return list(found)


def message(value: Any, key: str, where: str) -> Message:
    """One message.

    Args:
        value: the object in the row.
        key: its place in the row, for messages.
        where: place of the row.

    Raises:
        BadExample: it can't be read; see `shapes.item` for the reasons.
    """
    if not isinstance(value, Mapping):
        raise bad(where, "bad_content", f"{key} is not a message", value, '{"role": ..., "content": ...}')
    if value.get("role") is None and value.get("from") is not None:
        return _sharegpt(value, key, where)
    named = value.get("role")
    role = _SAME_ROLE.get(named, named) if isinstance(named, str) else None
    if role not in ROLES:
        raise bad(where, "unknown_role", f"{key} has no known role", named, f"one of {', '.join(ROLES)}")
    calls = value.get("tool_calls")
    if calls is None and value.get("function_call") is not None:  # OpenAI's older form
        calls = [value["function_call"]]
    found = tuple(_tool_call(call, key, where) for call in listed([] if calls is None else calls, where, key))
    if found and role != "assistant":
        raise bad(where, "bad_tool_call", f"{key} calls a tool, and is no assistant's", named, "role assistant")
    return Message(
        role,
        _content(value.get("content"), key, where),
        _optional(value, _REASONING, key, where) or None,
        found,
        _optional(value, ("tool_call_id",), key, where),
        _optional(value, ("name",), key, where),
        _train(value, role, key, where),
    )


def _sharegpt(value: Mapping[Any, Any], key: str, where: str) -> Message:
    speaker = value["from"]
    role = _SHAREGPT.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise bad(where, "unknown_role", f"{key} is from no known speaker", speaker, f"one of {', '.join(_SHAREGPT)}")
    train = _train(value, role, key, where)
    if speaker != "function_call":
        return Message(role, _content(value.get("value"), key, where), train=train)
    calls = parsed(value.get("value"), where, key)
    calls = calls if isinstance(calls, list) else [calls]
    return Message(role, None, tool_calls=tuple(_tool_call(call, key, where) for call in calls), train=train)


def _content(value: Any, key: str, where: str) -> str | None:
    """Text, nothing, or the joined text of its parts."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        return string(value, where, f"{key}.content")
    texts = []
    for part in value:
        if isinstance(part, Mapping) and part.get("type") not in (None, "text"):
            raise bad(where, "not_text", f"{key} holds a part that is not text", part.get("type"), "parts of type text")
        text = part.get("text") if isinstance(part, Mapping) else part
        texts.append(string(text, where, f"{key}.content"))
    return "".join(texts)


def _optional(value: Mapping[Any, Any], names: tuple[str, ...], key: str, where: str) -> str | None:
    found = next((value[name] for name in names if value.get(name) is not None), None)
    return None if found is None else string(found, where, f"{key}.{names[0]}")


def _train(value: Mapping[Any, Any], role: str, key: str, where: str) -> bool | None:
    """The message's own flag. `weight` counts for assistants only, as OpenAI has it; `train` for every role."""
    flags = []
    names = ("train", "weight") if role == "assistant" else ("train",)
    for name in names:
        flag = value.get(name)
        if flag is None:
            continue
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise bad(where, "bad_flag", f"{key}.{name} is no flag", flag, "0, 1, false or true")
        flags.append(bool(flag))
    if len(set(flags)) > 1:
        raise bad(where, "bad_flag", f"{key}: train and weight disagree", flags, "one of them")
    return flags[0] if flags else None


def _tool_call(value: Any, key: str, where: str) -> ToolCall:
    """A call as OpenAI has it, or its inner `{name, arguments}` alone."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(name, str) or not name:
        expected = '{"function": {"name": ..., "arguments": ...}}'
        raise bad(where, "bad_tool_call", f"{key} holds a tool call without a name", value, expected)
    given = inner.get("arguments")
    arguments = {} if given is None or given == "" else given
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise bad(where, "bad_arguments", f"{key}: arguments are not valid JSON: {error}", given, "JSON") from None
    if not isinstance(arguments, Mapping):
        raise bad(where, "bad_arguments", f"{key}: arguments are no object", given, 'an object, as in {"city": "Rome"}')
    number = value.get("id")
    return ToolCall(name, dict(arguments), number if isinstance(number, str) else None)


def tool_schemas(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row, as the list of schemas that templates read; bare functions are wrapped as OpenAI has them."""
    if value is None or value == "":
        return ()
    found = []
    for tool in listed(value, where, "tools"):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise bad(where, "bad_tools", "a tool without a name", tool, '{"type": "function", "function": {...}}')
        found.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(found)
