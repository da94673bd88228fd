"""Marks inside a rendered conversation: invisible signs at the end of each message's strings tell where they went.

A mark is one private-use character, put at the end of a string but before its trailing space, so that a template that
trims or splits at words treats the string as it would without. Taking the marks out must give the plain rendering;
where it does not, the template looked at the end of a string, and the marks are not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FIRST = 0x100000
_MARKS = re.compile("[\U00100000-\U0010fffd]")
PROBE = "\U000ffffd"
"""A content that no conversation has."""


def is_reserved(text: str) -> bool:
    """Whether a text holds characters that serve as marks."""
    return PROBE in text or _MARKS.search(text) is not None


@dataclass(frozen=True)
class Marked:
    """A rendering without its marks, and where they were.

    Args:
        text: the rendering.
        contents: place at which a message's content ends, by message.
        lasts: place of a message's last mark, by message.
        every: all places with their message, in order.
    """

    text: str
    contents: Mapping[int, int]
    lasts: Mapping[int, int]
    every: Sequence[tuple[int, int]]


def mark(messages: Sequence[Mapping[str, Any]], which: Iterable[int], thorough: bool = True) -> list[dict[str, Any]]:
    """Messages with marks in those of number `which`.

    Args:
        thorough: mark reasoning and tool calls too, not only the content.
    """
    chosen = set(which)
    return [_marked(one, number, thorough) if number in chosen else dict(one) for number, one in enumerate(messages)]


def _marked(message: Mapping[str, Any], number: int, thorough: bool) -> dict[str, Any]:
    content, other = chr(_FIRST + 2 * number), chr(_FIRST + 2 * number + 1)
    found = dict(message)
    if isinstance(found.get("content"), str):
        found["content"] = _end(found["content"], content)
    if thorough and "reasoning_content" in found:
        found["reasoning_content"] = _end(found["reasoning_content"], other)
    if thorough and "tool_calls" in found:
        found["tool_calls"] = [_call(call, other) for call in found["tool_calls"]]
    return found


def _call(call: Mapping[str, Any], sign: str) -> dict[str, Any]:
    function = call["function"]
    name = function["name"]
    arguments = function["arguments"]
    if isinstance(arguments, Mapping):
        arguments = {key: _end(value, sign) if isinstance(value, str) else value for key, value in arguments.items()}
    return {**call, "function": {**function, "name": _end(name, sign), "arguments": arguments}}


def _end(text: str, sign: str) -> str:
    core = text.rstrip()
    return core + sign + text[len(core) :] if core else text


def read(rendered: str) -> Marked:
    """Take the marks out of a rendering."""
    contents: dict[int, int] = {}
    lasts: dict[int, int] = {}
    every: list[tuple[int, int]] = []
    for count, found in enumerate(_MARKS.finditer(rendered)):
        number, is_other = divmod(ord(found.group()) - _FIRST, 2)
        place = found.start() - count
        every.append((place, number))
        lasts[number] = place
        if not is_other:
            contents[number] = place
    return Marked(_MARKS.sub("", rendered), contents, lasts, every)


def unmarked(rendered: str, place: int) -> int:
    """A place in a marked rendering, counted without the marks before it."""
    return place - len(_MARKS.findall(rendered, 0, place))
