"""Validation errors in our form: the path in the recipe, what was given, what is right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from .errors import RecipeError
from .fields import sections_in


def explain(error: ValidationError, model: type[BaseModel], where: str) -> RecipeError:
    """All that a validation found, one problem for each place; of a union's members only the place is named."""
    problems: dict[str, list[Mapping[str, Any]]] = {}
    for item in error.errors():
        problems.setdefault(".".join(_path(item)), []).append(item)
    return RecipeError("\n".join(str(_one(place, items, model, where)) for place, items in problems.items()))


def nearest(given: str, names: Iterable[str]) -> str:
    """The name that was probably meant, and all that are known."""
    names = list(names)
    near = difflib.get_close_matches(given, names, 1, 0.4)
    return f"{near[0]!r} perhaps; known here: {', '.join(names)}" if near else f"one of {', '.join(names)}"


def _path(item: Mapping[str, Any]) -> list[str]:
    """The keys that lead to the problem, without the labels that pydantic puts in for members of a union."""
    parts = item["loc"]
    own = [str(part) for part in parts if isinstance(part, int) or (part.isidentifier() and part not in _TYPES)]
    return [*own[:-1], str(parts[-1])] if item["type"] == "extra_forbidden" else own


_TYPES = {"int", "float", "str", "bool", "none", "dict", "list"}


def _one(place: str, items: Sequence[Mapping[str, Any]], model: type[BaseModel], where: str) -> RecipeError:
    item, where = items[0], f"{where}: {place}" if place else where
    path = place.split(".")
    if item["type"] == "extra_forbidden":
        key = path[-1]
        return RecipeError("unknown key", where=where, given=key, expected=nearest(key, _fields_at(model, path[:-1])))
    if item["type"] == "union_tag_invalid":
        tags = [tag.strip().strip("'") for tag in item["ctx"]["expected_tags"].split(",")]
        return RecipeError(
            f"unknown {_kind(item)}",
            where=where,
            given=item["ctx"]["tag"],
            expected=nearest(str(item["ctx"]["tag"]), tags),
        )
    if item["type"] == "union_tag_not_found":
        return RecipeError(f"the section has no {_kind(item)}", where=where, do=f"say with {_kind(item)} what it is")
    if item["type"] == "missing":
        return RecipeError("missing", where=where, do=f"write it in the recipe, or add {place}=... to the command")
    messages = [found["msg"].removeprefix("Value error, ") for found in items]
    joined = ", or ".join(message[0].lower() + message[1:] for message in dict.fromkeys(messages))
    given = None if isinstance(item["input"], Mapping) else repr(item["input"])  # a section would drown the message
    return RecipeError(joined, where=where, given=given)


def _kind(item: Mapping[str, Any]) -> str:
    """The key by which a section is one of several."""
    return str(item["ctx"]["discriminator"]).strip("'")


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Names of the fields of the section that `path` leads to; of sections told apart by their kind, it names that."""
    options = [model]
    for name in path:
        named = [one for one in options if "kind" in one.model_fields and one.model_fields["kind"].default == name]
        fields = [one.model_fields[name] for one in options if name in one.model_fields]
        inner = named or (sections_in(fields[0].annotation) if fields else [])
        options = inner or options
    return list(options[0].model_fields)
