"""A recipe that is being edited: a tree of plain values, its fields with their descriptions, and what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..common.errors import LuthierError, RecipeError
from ..common.fields import fields
from ..common.reading import build, config_of, parse, shipped
from .place import Place


@dataclass(frozen=True)
class Entry:
    """A field as the page shows it.

    Args:
        place: such as `optim.learning_rate`.
        description: of the schema.
        text: its value as YAML, the default's where the recipe says nothing.
        choices: the values that it may have, if they are few and known.
        is_set: whether the recipe says it.
    """

    place: str
    description: str
    text: str
    choices: tuple[str, ...]
    is_set: bool


def opened(place: Place, name: str) -> dict[str, Any]:
    """The tree of a recipe of the folder, or of one that ships.

    Raises:
        LuthierError: there is none, or it is no mapping.
    """
    file = place.inside(name) if name in place.recipes() else shipped().get(name)
    if file is None:
        raise RecipeError("no such recipe", where=name, expected="one of the folder, or one that ships")
    tree = parse(file.read_text(encoding="utf-8"), name)
    if not isinstance(tree, dict):
        raise RecipeError("a recipe is a mapping of sections", where=name)
    return tree


def problem(place: Place, tree: Mapping[str, Any]) -> str | None:
    """What is wrong with a recipe; None: nothing."""
    try:
        recipe = build(tree, "recipe")
        place.inside(recipe.output)
    except LuthierError as error:
        return str(error)
    return None


def changed(tree: Mapping[str, Any], field: str, text: str) -> dict[str, Any]:
    """The tree with a field set to a YAML value; an empty text takes it out, so that its default holds.

    Raises:
        RecipeError: no YAML, or a section that was given as a value.
    """
    made = copy.deepcopy(dict(tree))
    *parents, last = field.split(".")
    node = made
    for name in parents:
        if node.get(name) is None and text.strip():
            node[name] = {}
        found = node.get(name)
        node = {} if found is None else found
        if not isinstance(node, dict):
            raise RecipeError("is given as one value", where=field, do="edit it in the text")
    if text.strip():
        node[last] = parse(text, field)
    else:
        node.pop(last, None)
    return made


def sections(tree: Mapping[str, Any]) -> list[str]:
    """The sections of the recipe's kind, in their order. Raises RecipeError for a kind that is not known."""
    return list(_config(tree).model_fields)


def entries(tree: Mapping[str, Any], section: str) -> list[Entry]:
    """The fields of a section, those of sections within it too."""
    found = ((place, info) for place, info in fields(_config(tree)) if place.split(".")[0] == section)
    return [_entry(tree, place, info) for place, info in found]


def text_of(tree: Mapping[str, Any]) -> str:
    """The recipe as YAML."""
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True)


def _config(tree: Mapping[str, Any]) -> Any:
    task = tree.get("task")
    return config_of(str(task.get("kind") if isinstance(task, Mapping) else None), "task.kind")


def _entry(tree: Mapping[str, Any], place: str, info: FieldInfo) -> Entry:
    node: Any = tree
    for name in place.split("."):
        node = node.get(name, PydanticUndefined) if isinstance(node, Mapping) else PydanticUndefined
    is_set = node is not PydanticUndefined
    value = node if is_set else info.get_default(call_default_factory=True)
    description = " ".join((info.description or "").split())
    return Entry(place, description, _yaml(value), _choices(info.annotation), is_set)


def _yaml(value: Any) -> str:
    if value is PydanticUndefined:
        return ""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple):
        value = [one.model_dump(mode="json") if hasattr(one, "model_dump") else one for one in value]
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of a field that takes only named ones."""
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(str(one) for one in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not NoneType]
    if len(parts) == 1 and len(get_args(annotation)) == 2 and get_origin(parts[0]) is Literal:
        return (*_choices(parts[0]), "null")
    return ()
