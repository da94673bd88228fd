"""What must not get into anything that is shown to others: model cards, reports, trackers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

LEFT_OUT = "(left out)"

_KEY = re.compile(r"token$|secret|password|passwd|api_?key|credential", re.IGNORECASE)
_USER = re.compile(r"(\w+://)[^/@\s]+@")
_GIVEN = re.compile(r"(?i)([\w.-]*(?:token|(?:secret|password|passwd|api_?key|credential)\w*)[=: ]+)(\S+)")


def without_secrets(value: Any, key: str = "", text: Callable[[str], str] = str) -> Any:
    """Plain values without the texts of keys that look like secrets, and without the users of addresses.

    Args:
        value: plain, nested.
        key: of the value.
        text: what to make of every other text.
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(one, str(name), text) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one, key, text) for one in value]
    if isinstance(value, str):
        return LEFT_OUT if _KEY.search(key) else text(_USER.sub(r"\1", value))
    return value


def named(path: str) -> str:
    """A path of this machine by its last part; a hub name or an address as it is, without its user."""
    return Path(path).name if Path(path).is_absolute() else _USER.sub(r"\1", path)


def distinct(pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Pairs as a mapping that loses none: a name that comes again with another value is numbered, as short names do."""
    found: dict[str, Value] = {}
    for name, value in pairs:
        key, number = name, 2
        while key in found and found[key] != value:
            key, number = f"{name} ({number})", number + 1
        found[key] = value
    return found


def command_without_secrets(command: str) -> str:
    """A command line without the values of options and settings that look like secrets."""
    return str(_USER.sub(r"\1", _GIVEN.sub(rf"\1{LEFT_OUT}", command)))
