"""From another tool's file to a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..common.errors import RecipeError
from ..common.reading import build, parse
from ..common.recipe import Recipe
from . import axolotl, llama_factory, ms_swift, trl
from .draft import Draft, Line, Rule, is_off


@dataclass(frozen=True)
class Tool:
    """Another tool.

    Args:
        keys: what becomes of each of its keys; those of a mapping inside are written `trl.beta`.
        telling: keys that none of the other tools has.
        kind: the task kind of a file; raises RecipeError if it can't be told or is not known here.
        settle: what depends on several keys, and the tool's defaults that are not ours.
    """

    keys: Mapping[str, Rule]
    telling: frozenset[str]
    kind: Callable[[Mapping[str, Any], str], str]
    settle: Callable[[Draft], None]


TOOLS: dict[str, Tool] = {
    "axolotl": Tool(axolotl.KEYS, axolotl.TELLING, axolotl.kind, axolotl.settle),
    "llama-factory": Tool(llama_factory.KEYS, llama_factory.TELLING, llama_factory.kind, llama_factory.settle),
    "ms-swift": Tool(ms_swift.KEYS, ms_swift.TELLING, ms_swift.kind, ms_swift.settle),
    "trl": Tool(trl.KEYS, trl.TELLING, trl.kind, trl.settle),
}


@dataclass(frozen=True)
class Imported:
    """What became of a file.

    Args:
        tool: the tool that it was written for.
        tree: the recipe as plain values.
        lines: what became of each key.
        recipe: the recipe, checked; None if it is not valid.
        problem: why it is not valid.
    """

    tool: str
    tree: dict[str, Any]
    lines: list[Line]
    recipe: Recipe | None
    problem: RecipeError | None = None

    def text(self) -> str:
        """The recipe as YAML; what was not carried over stands above it."""
        head = [f"# From a file of {self.tool}, by `luthier import`."]
        lost = (f"{one.key}: {one.told}" for one in self.lines if one.status == "unsupported")
        head += [f"# not carried over: {' '.join(one.split())}" for one in lost]  # one line each, whatever the key
        return "\n".join(head) + "\n" + yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)


def import_file(file: Path, tool: str | None = None, kind: str | None = None) -> Imported:
    """Turn a file into a recipe.

    Args:
        file: YAML of another tool.
        tool: its name; None: told by its keys.
        kind: task kind, for files that don't say (ms-swift and TRL name it in the command).

    Raises:
        RecipeError: no YAML, no telling which tool it is for, or a training that is not known here.
    """
    try:
        given = parse(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise RecipeError("can't be read", where=file, given=error.strerror) from error
    except UnicodeDecodeError as error:
        raise RecipeError("not UTF-8 text", where=file, given=error.reason) from error
    if not isinstance(given, dict):
        raise RecipeError("not a mapping of keys", where=file, given=type(given).__name__)
    name = tool or guess(given, str(file))
    if name not in TOOLS:
        raise RecipeError("no such tool", where="--from", given=name, expected=", ".join(TOOLS))
    draft = Draft(given, str(file), kind or TOOLS[name].kind(given, str(file)))
    draft.put("task.kind", draft.kind)
    for key, value in given.items():
        _key(draft, TOOLS[name].keys, str(key), value, name)
    TOOLS[name].settle(draft)
    draft.default("output", f"runs/{file.stem}")
    tree = _ordered(draft.tree)
    try:
        return Imported(name, tree, draft.lines, build(tree, f"the recipe of {file.name}"))
    except RecipeError as error:
        return Imported(name, tree, draft.lines, None, error)


def guess(given: Mapping[str, Any], where: str) -> str:
    """The tool whose own keys a file has. Raises RecipeError if it has none, or about as many of another."""
    found = {name: sorted(tool.telling & given.keys()) for name, tool in TOOLS.items() if tool.telling & given.keys()}
    most, *others = sorted(found, key=lambda name: -len(found[name])) or [""]
    if most and all(len(found[most]) >= len(found[other]) + 2 for other in others):
        return most
    told = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in found.items())
    raise RecipeError(
        "can't tell which tool this is for",
        where=where,
        given=told or "no key that only one of the tools has",
        expected=f"a file of {', '.join(TOOLS)}",
        do="name it with --from",
    )


def _key(draft: Draft, keys: Mapping[str, Rule], key: str, value: Any, tool: str) -> None:
    inner = {name for name in keys if name.startswith(f"{key}.")}
    if key in keys and value is None:
        draft.say(key, value, "not needed", "empty")
    elif key in keys:
        before = len(draft.lines)
        try:
            keys[key](draft, key, value)
        except (AttributeError, LookupError, TypeError, ValueError):  # a file of others may hold anything
            draft.say(key, value, "unsupported", f"not a value that {tool} takes here; set it yourself")
        assert len(draft.lines) > before, key  # no key vanishes
    elif inner and isinstance(value, dict):
        for name, one in value.items():
            _key(draft, keys, f"{key}.{name}", one, tool)
    elif inner and is_off(value):
        draft.say(key, value, "not needed", "empty")
    else:
        draft.say(
            key, value, "unsupported", f"not a key of {tool} that is known here; look what it does, and set it yourself"
        )


def _ordered(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The sections in the order of a recipe, what is the kind's own after `data`."""
    own = [name for name in tree if name not in Recipe.model_fields]
    order = [name for name in Recipe.model_fields if name in tree]
    at = order.index("data") + 1 if "data" in order else len(order)
    return {name: tree[name] for name in [*order[:at], *own, *order[at:]]}
