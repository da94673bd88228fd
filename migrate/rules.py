"""The forms of rules that tables of keys are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .draft import Draft, Rule, is_off, shown


def to(place: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """A field of the recipe that means the same."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        try:
            found = convert(value)
        except (TypeError, ValueError):
            draft.say(key, value, "unsupported", f"not what {place} takes; set it yourself")
            return
        draft.mapped(key, value, {place: found}, note)

    return rule


def choice(place: str, names: Mapping[Any, Any], do: str = "") -> Rule:
    """A field whose values have other names; a value that is not among them can't be carried over."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value in names:
            draft.mapped(key, value, {place: names[value]})
        else:
            known = ", ".join(dict.fromkeys(str(one) for one in names.values()))
            draft.say(key, value, "unsupported", do or f"choose {place}: {known}")

    return rule


def needless(why: str) -> Rule:
    """A key that says nothing about a run here."""
    return lambda draft, key, value: draft.say(key, value, "not needed", why)


def missing(do: str) -> Rule:
    """A key that has no counterpart; one that switches something off needs none."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if is_off(value):
            draft.say(key, value, "not needed", "off, as it is here")
        else:
            draft.say(key, value, "unsupported", do)

    return rule


def same(ours: Any, do: str) -> Rule:
    """A key of which only one value is known here."""
    return lambda draft, key, value: (
        draft.say(key, value, "not needed", "as here") if value == ours else draft.say(key, value, "unsupported", do)
    )


def unless_off(rule: Rule, why: str = "off, as it is here") -> Rule:
    """A rule for values that switch something on."""
    return lambda draft, key, value: (
        draft.say(key, value, "not needed", why) if is_off(value) else rule(draft, key, value)
    )


def only_with(name: str, rule: Rule, *values: Any) -> Rule:
    """A rule that counts only where another key is on, or has one of these values."""

    def chosen(draft: Draft, key: str, value: Any) -> None:
        other = draft.given.get(name)
        if (other in values) if values else not is_off(other):
            rule(draft, key, value)
        else:
            draft.say(key, value, "not needed", f"counts only with {name}{' ' + shown(values[0]) if values else ''}")

    return chosen


def by_kind(rules: Mapping[str, Rule], otherwise: str = "means nothing in this training") -> Rule:
    """Another rule for each kind; kinds that are not there don't need the key."""
    return lambda draft, key, value: rules.get(draft.kind, needless(otherwise))(draft, key, value)


def number(value: Any) -> float:
    """A number, also from its text, as YAML 1.1 leaves 1e-5."""
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def flag(value: Any) -> bool:
    """A truth value, also from its text."""
    return value.lower() not in ("false", "no", "off", "none", "") if isinstance(value, str) else bool(value)


def whole(value: Any) -> int:
    found = number(value)
    if found != int(found):
        raise ValueError(value)
    return int(found)


def listed(value: Any) -> list[str]:
    """A list of names, also from `a,b` and `a b`."""
    return [str(one) for one in value] if isinstance(value, list | tuple) else str(value).replace(",", " ").split()
