"""Scores of answers: what counts as right, and what a recipe may ask for."""

from __future__ import annotations

import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from luthier.common.errors import DataError, LuthierError, RecipeError
from luthier.common.reading import build
from luthier.modalities.llm.config import GenerateSection
from luthier.modalities.llm.scoring import (
    contains,
    exact_match,
    last_number,
    math_verify,
    numeric,
    regex,
    said,
    scores,
    valid_json,
)

OWN = """
def length(answer, reference, row):
    return len(answer) / row["most"]

def broken(answer, reference, row):
    return row["missing"]

def endless(answer, reference, row):
    return float("inf")
"""


def test_white_space_does_not_count_and_case_does() -> None:
    assert exact_match(" the  sum\nis 5 ", "the sum is 5") == 1
    assert exact_match("The sum is 5", "the sum is 5") == 0
    assert contains("I think the\nsum is 5.", "the sum is 5") == 1
    assert contains("the sum is 4", "5") == 0


def test_what_a_model_thinks_is_not_its_answer() -> None:
    assert said("<think>\nis it 4?\n</think>\n\n5") == "5"
    assert said("is it 4? </think> no </think> 5") == "5", "a prompt may have opened the thought"
    assert said("<think> it never ends: 5") == "<think> it never ends: 5"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The sum is 95.", Fraction(95)),
        ("-1,234.50 in all", Fraction(-12345, 10)),
        ("5-3", Fraction(3)),
        ("(2)-4", Fraction(4)),
        ("x = -4", Fraction(-4)),
        ("x=\N{MINUS SIGN}4", Fraction(-4)),
        ("2e-3.", Fraction(1, 500)),
        ("1,2345", Fraction(2345)),
        ("$1,000,000!", Fraction(1000000)),
        (".5", Fraction(1, 2)),
        ("3 or 0.1", Fraction(1, 10)),
        ("10px", Fraction(10)),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


def test_numbers_are_compared_by_value() -> None:
    assert numeric("so it is 1,000.0", "#### 1000") == 1
    assert numeric("0.1 + 0.2 = 0.3", "0.30") == 1
    assert numeric("0.3000000000000001", "0.3") == 0, "exactly, not as floats"
    assert numeric("no idea", "3") == 0
    assert numeric("none of them", "none  of them") == 1, "a reference without a number"
    assert numeric("3 of them", "none of them") == 0


def test_a_regular_expression_compares_its_last_hit() -> None:
    pattern = re.compile(r"answer is (\w+)")
    assert regex("the answer is 4. No, the answer is 5.", "5", pattern) == 1
    assert regex("the answer is 5. No, the answer is 4.", "5", pattern) == 0
    assert regex("5", "5", pattern) == 0, "no hit"
    assert regex("the answer is 5", "2 + 3, so the answer is 5", pattern) == 1, "the reference in the same form"
    assert regex("yes, yes", "yes", re.compile("yes|no")) == 1, "without a group: the whole hit"
    assert regex("b", "", re.compile("(a)?b")) == 1, "a group that takes no part is empty"


def test_json_is_valid_as_a_whole_or_not_at_all() -> None:
    assert valid_json('{"city": "Rome"}', "") == 1
    for wrong in ('{"city": "Rome"', 'Here: {"city": "Rome"}', "NaN", "", "[" * 100_000):
        assert valid_json(wrong, "") == 0, wrong[:20]


def test_json_fits_a_schema(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "required": ["city"]}')
    score = scores(GenerateSection(scores=("json",), json_schema=str(file)))["json"]
    assert score('{"city": "Rome"}', "", {}) == 1
    assert score('{"town": "Rome"}', "", {}) == 0
    file.write_text('{"type": "objet"}')
    with pytest.raises(RecipeError, match="not a JSON Schema"):
        scores(GenerateSection(scores=("json",), json_schema=str(file)))


def test_mathematics_by_math_verify() -> None:
    pytest.importorskip("math_verify")
    assert math_verify(r"so it is \boxed{\frac{2}{4}}", "0.5") == 1
    assert math_verify(r"$\sqrt{2}$", r"\sqrt{2}") == 1, "a bare formula as reference"
    assert math_verify("$x^2$", "$x^3$") == 0
    assert math_verify("none of them", "none  of them") == 1, "a reference that is no formula"


@pytest.mark.parametrize(
    ("module", "section"),
    [("math_verify", {"scores": ("math_verify",)}), ("jsonschema", {"scores": ("json",), "json_schema": "a.json"})],
)
def test_a_missing_package_names_its_extra(
    module: str, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LuthierError, match=r"luthier\[llm\]"):
        scores(GenerateSection(**section))


# ------------------------------------------------------------------------------------------------ the user's own


def test_a_function_of_the_user_s_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    section = GenerateSection(scores=("exact_match", "own.py:length"))
    assert section.scores[1] == f"{tmp_path / 'own.py'}:length", "the saved recipe works from any folder"
    found = scores(section)
    assert list(found) == ["exact_match", "length"]
    assert found["length"]("<think></think>ab", "", {"most": 34}) == 0.5, "the answer as it is"


def test_a_function_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "luthier_test_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = scores(GenerateSection(scores=("luthier_test_own:length",)))
    assert found["length"]("abcd", "", {"most": 4}) == 1
    del sys.modules["luthier_test_own"]


@pytest.mark.parametrize("given", ["nowhere_at_all:f", "{folder}/none.py:f", "{folder}/own.py:none"])
def test_a_function_that_is_not_there_is_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(RecipeError, match=r"evaluate\.generate\.scores"):
        scores(GenerateSection(scores=(given.format(folder=tmp_path),)))


def test_a_function_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    names = ("broken", "endless")
    found = scores(GenerateSection(scores=tuple(f"{tmp_path}/own.py:{name}" for name in names)))
    with pytest.raises(DataError, match=r"own\.py:broken: the score failed: KeyError"):
        found["broken"]("a", "b", {})
    with pytest.raises(DataError, match=r"own\.py:endless: the score is not finite"):
        found["endless"]("a", "b", {})


# ------------------------------------------------------------------------------------------------ the recipe


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"scores": ["exactmatch"]}, "evaluate.generate.scores"),
        ({"scores": ["own.py:exact_match"]}, "a name of its own"),
        ({"scores": [":f"]}, "module:function"),
        ({"scores": []}, "evaluate.generate.scores"),
        ({"scores": ["a:f", "b:f"]}, "the same name"),
        ({"scores": ["regex"]}, "its pattern"),
        ({"pattern": "a"}, "its pattern"),
        ({"scores": ["regex"], "pattern": "("}, "not a regular expression"),
        ({"json_schema": "a.json"}, "needs the score json"),
        ({"temperature": 0.5, "num_beams": 2}, "either temperature or num_beams"),
    ],
)
def test_a_section_that_can_t_be_meant_is_refused(section: dict[str, Any], problem: str) -> None:
    tree = {
        "task": {"kind": "llm.sft"},
        "model": {"path": "m"},
        "data": {"train": "a.jsonl"},
        "evaluate": {"generate": section},
        "output": "o",
    }
    with pytest.raises(RecipeError, match=re.escape(problem)):
        build(tree, "recipe")
