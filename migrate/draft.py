"""A recipe that is being made of another tool's file, and what became of each of its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..common.fields import field_at
from ..common.reading import config_of

Status = Literal["mapped", "not needed", "unsupported", "default"]


@dataclass(frozen=True)
class Line:
    """What became of a key.

    Args:
        key: its path in the file, such as `datasets[0].type`.
        value: what was given.
        status: `default`: the file lacks the key, and the tool's default, which is not ours, was carried over.
        told: the fields of the recipe, the reason why it is not needed, or what to do instead.
    """

    key: str
    value: Any
    status: Status
    told: str


@dataclass
class Draft:
    """The recipe so far.

    Args:
        given: the tool's file.
        where: its name.
        kind: task kind of the recipe.
        tree: the recipe.
        lines: one or more for each key of the file.
    """

    given: Mapping[str, Any]
    where: str
    kind: str
    tree: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Whether any of these keys is given and not off."""
        return any(not is_off(self.given.get(name)) for name in names)

    def put(self, place: str, value: Any) -> None:
        """Set a field of the recipe, such as `optim.learning_rate`."""
        *parents, last = place.split(".")
        node = self.tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value

    def get(self, place: str, default: Any = None) -> Any:
        """A field of the recipe so far."""
        node: Any = self.tree
        for name in place.split("."):
            if not isinstance(node, dict) or name not in node:
                return default
            node = node[name]
        return node

    def drop(self, place: str) -> None:
        *parents, last = place.split(".")
        node = self.get(".".join(parents)) if parents else self.tree
        if isinstance(node, dict):
            node.pop(last, None)

    def say(self, key: str, value: Any, status: Status, told: str) -> None:
        self.lines.append(Line(key, value, status, told))

    def mapped(self, key: str, value: Any, fields: Mapping[str, Any], note: str = "") -> None:
        """Set fields of the recipe for a key; a field that the kind lacks can't be set."""
        lacking = [place for place in fields if field_at(config_of(self.kind), place) is None]
        if lacking:
            self.say(key, value, "unsupported", f"{self.kind} has no {', '.join(lacking)}")
            return
        for place, one in fields.items():
            self.put(place, one)
        told = ", ".join(f"{place}: {shown(one)}" for place, one in fields.items())
        self.say(key, value, "mapped", f"{told}; {note}" if note else told)

    def default(self, place: str, value: Any) -> None:
        """Carry the tool's default over, unless the file has said otherwise."""
        if self.get(place) is None:
            self.put(place, value)
            self.say("(not given)", None, "default", f"{place}: {shown(value)}")


Rule = Callable[[Draft, str, Any], None]
"""What becomes of a key: called with the draft, the key and its value, it adds one line or more."""


def is_off(value: Any) -> bool:
    """Whether a value says that something is not wanted."""
    return value is None or value is False or value in ("", "none", "None", "no", "false", [], {}) or (
        isinstance(value, int | float) and value == 0
    )  # fmt: skip


def shown(value: Any) -> str:
    """A value as YAML has it, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
