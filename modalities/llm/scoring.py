"""Scores of answers: each a function of the answer and the reference, from 0 (wrong) to 1 (right)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ...common.errors import DataError, RecipeError, missing_extra
from .config import GenerateSection, score_name

Score = Callable[[str, str, Mapping[str, Any]], float]
"""(answer, reference, further fields of the row) -> score."""

_THOUGHT = re.compile(r".*</think>", re.DOTALL)
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\N{MINUS SIGN}])?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?"
)


def said(answer: str) -> str:
    """An answer without what the model thought before it: what follows the last `</think>`."""
    return _THOUGHT.sub("", answer, count=1).strip()


def exact_match(answer: str, reference: str) -> float:
    """Whether both are the same, whatever their white space."""
    return float(_plain(answer) == _plain(reference))


def contains(answer: str, reference: str) -> float:
    """Whether the reference stands in the answer, whatever their white space."""
    return float(_plain(reference) in _plain(answer))


def regex(answer: str, reference: str, pattern: re.Pattern[str]) -> float:
    """Whether the pattern's last hit in the answer (its first group, if it has one) is the reference's last hit; is
    the reference, if that has none. An answer without a hit is wrong."""
    found = _hit(answer, pattern)
    wanted = _hit(reference, pattern)
    return 0.0 if found is None else exact_match(found, reference if wanted is None else wanted)


def _hit(text: str, pattern: re.Pattern[str]) -> str | None:
    hits = list(pattern.finditer(text))
    if not hits:
        return None
    return (hits[-1].group(1) or "") if pattern.groups else hits[-1].group()


def numeric(answer: str, reference: str) -> float:
    """Whether the last number of both has the same value, exactly; a reference without one is compared as text."""
    wanted = last_number(reference)
    return exact_match(answer, reference) if wanted is None else float(last_number(answer) == wanted)


def last_number(text: str) -> Fraction | None:
    """The last number in a text: digits with a sign, commas between thousands, decimals and an exponent, such as
    `-1,234.50` or `2e-3`. A sign counts unless a word, a number or a bracket stands right before it: `5-3` ends with 3.
    """
    found = _NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "").replace("\N{MINUS SIGN}", "-")) if found else None


def math_verify(answer: str, reference: str) -> float:
    """Whether both are the same mathematically, by the package math-verify; a reference that it can't read is compared
    as text. A bare formula may be a reference; in an answer it has to stand in `$`, `\\boxed` or the like."""
    from math_verify import parse, verify  # type: ignore[import-not-found,import-untyped,unused-ignore]

    wanted = parse(reference) or (parse(f"${reference}$") if set("\\^") & set(reference) else [])
    return float(verify(wanted, parse(answer))) if wanted else exact_match(answer, reference)


def valid_json(answer: str, reference: str, schema: Mapping[str, Any] | None = None) -> float:
    """Whether the answer is one JSON value and nothing else, that fits the JSON Schema if there is one."""
    try:
        value = json.loads(answer, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    if schema is None:
        return 1.0
    from jsonschema import validators  # type: ignore[import-untyped]

    return float(validators.validator_for(schema)(schema).is_valid(value))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _plain(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------ of a recipe


def scores(section: GenerateSection) -> dict[str, Score]:
    """The scores that a recipe asks for, by name.

    Raises:
        RecipeError: a function or a schema that can't be used.
        LuthierError: a package is missing; it names the extra that brings it.
    """
    return {score_name(given): _score(given, section) for given in section.scores}


def _score(given: str, section: GenerateSection) -> Score:
    if ":" in given:
        return _own(given)
    if given == "math_verify":
        needed("math_verify", "math-verify")
    place = "evaluate.generate.json_schema"
    schema = None if section.json_schema is None else load_schema(Path(section.json_schema), place)
    known: dict[str, Callable[[str, str], float]] = {
        "exact_match": exact_match,
        "contains": contains,
        "regex": partial(regex, pattern=re.compile(section.pattern or "", re.MULTILINE)),
        "numeric": numeric,
        "math_verify": math_verify,
        "json": partial(valid_json, schema=schema),
    }
    return lambda answer, reference, row: known[given](said(answer), said(reference))


def needed(module: str, package: str) -> None:
    """Refuse to go on without a package, naming the extra that brings it."""
    if importlib.util.find_spec(module) is None:
        raise missing_extra(package, "llm")


def load_schema(file: Path, where: str) -> Mapping[str, Any]:
    """A JSON Schema, checked.

    Args:
        where: the recipe's key, for messages.
    """
    needed("jsonschema", "jsonschema")
    from jsonschema import exceptions, validators

    try:
        schema: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        validators.validator_for(schema).check_schema(schema)
    except (OSError, ValueError, exceptions.SchemaError) as error:
        problem = f"not a JSON Schema: {str(error).splitlines()[0]}"
        raise RecipeError(problem, where=where, given=file) from error
    return schema


def _own(given: str) -> Score:
    """The user's function; it gets the answer as it is, with what the model thought."""
    function = load_function(given, "evaluate.generate.scores")

    def score(answer: str, reference: str, row: Mapping[str, Any]) -> float:
        try:
            found = float(function(answer, reference, row))
        except Exception as error:
            raise DataError(f"the score failed: {type(error).__name__}: {error}", where=given, given=answer) from error
        if not math.isfinite(found):
            raise DataError("the score is not finite", where=given, given=found)
        return found

    return score


def load_function(given: str, where: str) -> Callable[..., Any]:
    """The function, or class, of `module:name` or `file.py:name`.

    Args:
        where: the recipe's key, for messages.

    Raises:
        RecipeError: it is not there, or its module can't be imported.
    """
    place, _, name = given.rpartition(":")
    found = getattr(_module(place, given, where), name, None)
    if not callable(found):
        raise RecipeError("no such function", where=where, given=given)
    return found  # type: ignore[no-any-return]


def _module(place: str, given: str, where: str) -> ModuleType:
    """The module of a file, or of the environment."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None  # a name that ends in .py has one
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        problem = f"can't be imported: {type(error).__name__}: {error}"
        raise RecipeError(problem, where=where, given=given) from error
    return module
