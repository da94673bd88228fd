"""Reading recipes: YAML's safe loader, `key=value` overrides, and strict validation.

An unknown key, kind or value is refused with its path, what was given and the nearest right name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from . import kinds
from .errors import RecipeError
from .explain import explain, nearest
from .recipe import Recipe


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key given twice, and reads 1e-4 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in own]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise RecipeError(f"the key {key!r} is given twice", where=f"{self.name}, from line {line}")
        return super().construct_mapping(node, deep)


def parse(text: str, where: str) -> Any:
    """The value of a YAML text. Raises RecipeError, with the line, if it is not valid."""
    try:
        loader = _Loader(text)
        loader.name = where
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"not valid YAML: {problem}", where=f"{where}{line}") from error


def shipped() -> dict[str, Path]:
    """The recipes that ship, by name (`asr/whisper`)."""
    root = Path(__file__).parent.parent / "recipes"
    return {str(file.relative_to(root).with_suffix("")): file for file in sorted(root.rglob("*.yaml"))}


def find(name: str | os.PathLike[str]) -> Path:
    """The file of a recipe: a path, or the name of one that ships (`asr/whisper`, `recipes/asr/whisper.yaml`)."""
    path = Path(name)
    if path.is_file():
        return path
    known = shipped()
    plain = str(path.with_suffix("") if path.suffix == ".yaml" else path).removeprefix("recipes/")
    if plain in known:
        return known[plain]
    near = difflib.get_close_matches(plain, known, 1, 0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError("no such recipe", given=name, do=f"{hint}`luthier recipes list` names those that ship")


def override(tree: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The tree with `a.b=value` assignments put in; values are YAML (`null`, `[1, 2]`, `1e-4`, `text`)."""
    for text in assignments:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise RecipeError("not an override", given=text, expected="key=value, such as train.epochs=2")
        *parents, last = key.strip().split(".")
        node = tree
        for at, name in enumerate(parents):
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
            if not isinstance(node, dict):
                place = ".".join(parents[: at + 1])
                raise RecipeError("has no keys below it", where=place, given=text, do=f"override {place} as a whole")
        node[last] = parse(value, f"override {text}") if value else ""
    return tree


def load(name: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        name: a file, or the name of a recipe that ships.
        overrides: `key=value` texts.

    Raises:
        RecipeError: all that is wrong with it, each with its path, what was given and what is right.
    """
    try:
        text = find(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=name) from error
    tree = parse(text, str(name))
    if not isinstance(tree, dict):
        raise RecipeError("a recipe is a mapping of sections", where=name, given=type(tree).__name__)
    return build(override(tree, overrides), str(name))


def build(tree: Mapping[str, Any], where: str) -> Recipe:
    """Validate a tree of plain values as the `Config` of its kind."""
    task = tree.get("task")
    kind = task.get("kind") if isinstance(task, Mapping) else None
    if not isinstance(kind, str):
        raise RecipeError("missing", where=f"{where}: task.kind", expected=f"one of {', '.join(kinds.names())}")
    config = config_of(kind, f"{where}: task.kind")
    try:
        recipe: Recipe = config.model_validate(tree)
    except ValidationError as error:
        raise explain(error, config, where) from None
    return recipe


def config_of(kind: str, where: str = "kind") -> type[Recipe]:
    """The recipe class of a kind. Raises RecipeError, with the nearest name, if there is none."""
    try:
        return kinds.config(kind)
    except KeyError:
        expected = nearest(kind, kinds.names())
        raise RecipeError("unknown kind", where=where, given=kind, expected=expected) from None
