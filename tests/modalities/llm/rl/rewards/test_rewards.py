"""What each reward gives, and that what fails is one answer's alone."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from luthier.common.errors import LuthierError, RecipeError
from luthier.common.reading import build
from luthier.modalities.llm.rl.rewards import config
from luthier.modalities.llm.rl.rewards.answer import Answer, Failure
from luthier.modalities.llm.rl.rewards.config import RewardSections
from luthier.modalities.llm.rl.rewards.rewards import Rewards

OWN = """
import asyncio, time

def length(answers, scale=1.0):
    return [len(one.completion) * scale for one in answers]

async def slow_but_together(answers):
    async def one(answer):
        await asyncio.sleep(0.2)
        return float(answer.row["n"])
    return await asyncio.gather(*(one(answer) for answer in answers))

def odd(answers):
    return [1.0 if one.row["n"] % 2 else None for one in answers]

def fails_at_two(answers):
    return [1 / (one.row["n"] - 2) for one in answers]

def endless(answers):
    return [float("inf") for one in answers]

def text(answers):
    return ["much" for one in answers]

def too_few(answers):
    return [1.0]

def hangs(answers):
    time.sleep(3)
    return [1.0 for _ in answers]

async def hangs_async(answers):
    await asyncio.sleep(30)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def sections(*given: dict[str, Any]) -> Any:
    return TypeAdapter(RewardSections).validate_python(given)


def answers(*said: str, tokens: int = 5, finished: bool = True, **row: Any) -> list[Answer]:
    return [Answer("asked", one, tokens, finished, {"n": n, **row}) for n, one in enumerate(said)]


def scores(section: dict[str, Any], given: list[Answer]) -> list[float]:
    found = Rewards(sections(section)).score(given)
    assert not found.errors
    np.testing.assert_array_equal(found.total, *found.by_name.values())
    return [float(one) for one in found.total]


# ------------------------------------------------------------------------------------------------ together


def test_the_total_is_the_weighted_sum(own: Path) -> None:
    given = sections(
        {"kind": "exact", "weight": 2.0},
        {"kind": "function", "function": f"{own}:length", "weight": -0.5, "parameters": {"scale": 0.1}},
    )
    found = Rewards(given).score(answers("five", "six", answer="five"))
    assert list(found.by_name) == ["exact", "length"]
    np.testing.assert_array_equal(found.by_name["exact"], [1, 0])
    np.testing.assert_allclose(found.by_name["length"], [0.4, 0.3])
    np.testing.assert_allclose(found.total, [2 - 0.2, -0.15])


def test_what_fails_for_one_answer_takes_out_that_answer_alone(own: Path) -> None:
    given = sections(
        {"kind": "function", "function": f"{own}:fails_at_two"}, {"kind": "function", "function": f"{own}:odd"}
    )
    found = Rewards(given).score(answers("a", "b", "c", "d"))
    np.testing.assert_array_equal(found.by_name["fails_at_two"], [-0.5, -1, math.nan, 1])
    np.testing.assert_array_equal(found.by_name["odd"], [math.nan, 1, math.nan, 1])
    np.testing.assert_array_equal(found.total, [math.nan, 0, math.nan, 2])
    assert found.errors == (
        Failure(2, "fails_at_two", "ZeroDivisionError: division by zero"),
        Failure(0, "odd", "the reward gives none"),
        Failure(2, "odd", "the reward gives none"),
    )


def test_a_reward_that_is_only_watched_takes_no_answer_out(own: Path) -> None:
    given = sections({"kind": "function", "function": f"{own}:odd", "weight": 0.0}, {"kind": "exact"})
    found = Rewards(given).score(answers("a", "b", answer="a"))
    np.testing.assert_array_equal(found.total, [1, 0])
    assert [one.answer for one in found.errors] == [0]


def test_a_row_without_the_reference_is_told() -> None:
    given = [Answer("asked", "5", 1, True, {"answer": "5"}), Answer("asked", "5", 1, True, {})]
    found = Rewards(sections({"kind": "exact"})).score(given)
    np.testing.assert_array_equal(found.total, [1, math.nan])
    assert found.errors == (Failure(1, "exact", "the row has no field 'answer'"),)


def test_no_answers_have_no_scores(own: Path) -> None:
    found = Rewards(sections({"kind": "exact"}, {"kind": "function", "function": f"{own}:length"})).score([])
    assert found.total.shape == (0,)
    assert not found.errors


# ------------------------------------------------------------------------------------------------ functions


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("endless", "not finite: inf"),
        ("text", "not a number: 'much'"),
        ("too_few", "ValueError: 1 scores for 2 answers"),
    ],
)
def test_what_is_no_score_is_told(own: Path, name: str, reason: str) -> None:
    found = Rewards(sections({"kind": "function", "function": f"{own}:{name}"})).score(answers("a", "b"))
    if name == "too_few":  # alone, each answer gets its one
        np.testing.assert_array_equal(found.total, [1, 1])
        return
    assert np.isnan(found.total).all()
    assert {one.reason for one in found.errors} == {reason}


def test_an_async_function_waits_for_all_answers_together(own: Path) -> None:
    started = time.monotonic()
    found = scores({"kind": "function", "function": f"{own}:slow_but_together"}, answers(*"abcdefgh"))
    assert found == [float(n) for n in range(8)]
    assert time.monotonic() - started < 8 * 0.2


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
def test_a_function_that_takes_too_long_gives_no_scores(own: Path, name: str) -> None:
    started = time.monotonic()
    section = {"kind": "function", "function": f"{own}:{name}", "timeout": 0.3}
    found = Rewards(sections(section, {"kind": "exact"})).score(answers("a", "b", answer="a"))
    assert time.monotonic() - started < 2.5
    assert np.isnan(found.total).all()
    assert found.errors == tuple(Failure(number, name, "took longer than 0.3 s") for number in (0, 1))
    np.testing.assert_array_equal(found.by_name["exact"], [1, 0])


@pytest.mark.parametrize("given", ["nowhere_at_all:f", "{folder}/own.py:none", "{folder}/none.py:f"])
def test_a_function_that_is_not_there_is_refused(own: Path, given: str) -> None:
    section = {"kind": "function", "function": given.format(folder=own.parent)}
    with pytest.raises(RecipeError, match=r"rewards\.function"):
        Rewards(sections(section))


# ------------------------------------------------------------------------------------------------ comparisons


def test_exact() -> None:
    given = answers(" five\n", "Five", "<think>six?</think> five", "so <answer> five </answer>.", answer="five")
    assert scores({"kind": "exact"}, given) == [1, 0, 1, 0]
    assert scores({"kind": "exact", "tag": "answer"}, given) == [0, 0, 0, 1]
    nested = answers("<think><answer>five</answer></think>", "<answer>six</answer><answer>five</answer>", answer="five")
    assert scores({"kind": "exact", "tag": "answer"}, nested) == [0, 1], "a thought is no answer; the last one counts"


def test_numbers() -> None:
    given = answers("that is 1,234.50", "1234.5 or 7", "none", answer="1234.5")
    assert scores({"kind": "number", "by": "last_number"}, given) == [1, 0, 0]
    formulas = answers(r"$\frac{2}{4}$", r"\boxed{0.5}", r"$\frac{1}{3}$", answer=r"\frac{1}{2}")
    assert scores({"kind": "number"}, formulas) == [1, 1, 0]
    assert scores({"kind": "number", "by": "last_number"}, answers("5", "6", answer=5)) == [1, 0], "5 as a number"


def test_regular_expressions() -> None:
    given = answers("#### 5", "<think>#### 5</think> 6", answer="so\n#### 5")
    assert scores({"kind": "regex", "pattern": r"^#### \d+$"}, given) == [1, 0]
    assert scores({"kind": "regex", "pattern": r"#### \d+", "whole": True}, given) == [1, 1]
    assert scores({"kind": "regex", "pattern": r"#### (\d+)", "reference": "answer"}, given) == [1, 0]


def test_the_format_of_tags() -> None:
    right = "<think>a</think>\n<answer>b</answer>\n"
    given = answers(
        right, "<answer>b</answer><think>a</think>", f"{right}c", f"{right}{right}", "<think>a</think>", "b"
    )
    assert scores({"kind": "format"}, given) == [1, 0, 0, 0, 0, 0]
    assert scores({"kind": "format", "partial": True}, given) == [1, 1, 1, 0, 0.5, 0]
    opened = answers("a</think><answer>b</answer>", right)
    assert scores({"kind": "format", "opened": True}, opened) == [1, 0], "the prompt has opened the first"
    assert scores({"kind": "format", "tags": ["a"]}, answers("<a>\n</a>", "<a></a><a></a>")) == [1, 0]


def test_json(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}')
    given = answers('{"n": 5}', '{"n": "5"}', "n: 5", '<answer>{"n": 6}</answer>')
    assert scores({"kind": "json"}, given) == [1, 1, 0, 0]
    assert scores({"kind": "json", "json_schema": str(file)}, given) == [1, 0, 0, 0]
    assert scores({"kind": "json", "json_schema": str(file), "tag": "answer"}, given) == [0, 0, 0, 1]
    file.write_text('{"type": "nothing"}')
    with pytest.raises(RecipeError, match=r"rewards\.json_schema"):
        Rewards(sections({"kind": "json", "json_schema": str(file)}))


# ------------------------------------------------------------------------------------------------ lengths


def test_the_overlong_punishment_is_that_of_dapo() -> None:
    """Eq. 13 with L_max 20 and L_cache 5: 0 up to 15, (15 - L) / 5 up to 20, -1 beyond."""
    section = {"kind": "overlong", "max_length": 20, "cache": 5}
    given = [Answer("", "", tokens, True) for tokens in (0, 15, 16, 18, 20, 21, 1000)]
    assert scores(section, given) == pytest.approx([0, 0, -1 / 5, -3 / 5, -1, -1, -1])


def test_the_cosine_goes_from_short_to_long() -> None:
    """At 0, a third, half and all of the length a cosine is 1, 1/2, 0 and -1."""
    section = {
        "kind": "cosine", "correct": {"kind": "exact"}, "max_length": 60, "right_short": 2, "right_long": 1,
        "wrong_short": -10, "wrong_long": 0, "exceeded": -7,
    }  # fmt: skip
    right = [Answer("", "5", tokens, True, {"answer": "5"}) for tokens in (0, 20, 30, 59)]
    assert scores(section, right)[:3] == pytest.approx([2, 1 + 0.75, 1.5])
    assert scores(section, right)[3] == pytest.approx(1 + 0.5 * (1 + math.cos(math.pi * 59 / 60)))
    wrong = [Answer("", "6", tokens, True, {"answer": "5"}) for tokens in (0, 20, 30)]
    assert scores(section, wrong) == pytest.approx([-10, -7.5, -5])
    cut = [Answer("", "5", 60, True, {"answer": "5"}), Answer("", "5", 3, False, {"answer": "5"})]
    assert scores(section, cut) == [-7, -7]
    found = Rewards(sections(section)).score([Answer("", "5", 3, True), right[0]])
    np.testing.assert_array_equal(found.total, [math.nan, 2])
    assert found.errors == (Failure(0, "cosine", "the row has no field 'answer'"),)


def test_repetitions_are_counted_by_n_grams() -> None:
    """`a b a b a b` has 5 pairs, 2 of them different: 3 / 5 stood before."""
    given = answers("a b a B a b", "a b c d", "a", "")
    assert scores({"kind": "repetition", "size": 2}, given) == pytest.approx([-3 / 5, 0, 0, 0])
    assert scores({"kind": "repetition", "size": 3}, answers("x " * 50)) == pytest.approx([-(1 - 1 / 48)])


# ------------------------------------------------------------------------------------------------ the recipe


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([{"kind": "exactly"}], "exact"),
        ([{"kind": "exact", "weigth": 1}], "weigth"),
        ([{"kind": "exact"}, {"kind": "exact"}], "two rewards are called 'exact'"),
        ([{"kind": "exact", "weight": 0}], "no reward has a weight"),
        ([], "no reward has a weight"),
        ([{"kind": "function", "function": "length"}], "module:function"),
        ([{"kind": "regex", "pattern": "("}], "not a regular expression"),
        ([{"kind": "overlong", "max_length": 5, "cache": 6}], "cache is larger"),
        ([{"kind": "http", "url": "localhost"}], "url"),
        ([{"kind": "cosine", "max_length": 5, "correct": {"kind": "overlong"}}], "correct"),
    ],
)
def test_sections_that_can_t_be_meant_are_refused(given: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        sections(*given)


def test_a_file_becomes_absolute(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    found = sections({"kind": "function", "function": "own.py:length"})[0]
    assert found.function == f"{own}:length"
    assert TypeAdapter(RewardSections).validate_python([found.model_dump(mode="json")]) == (found,)


def test_every_field_is_described() -> None:
    kinds = [one for one in vars(config).values() if isinstance(one, type) and issubclass(one, config.RewardSection)]
    assert len(kinds) > 12
    for kind in kinds:
        missing = [name for name, field in kind.model_fields.items() if not field.description]
        assert not missing, kind


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LuthierError, match=r"luthier\[llm\]"):
        Rewards(sections({"kind": "number"}))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kind": "exactly"}, "rewards.0: unknown kind\n  given:    exactly\n  expected: 'exact' perhaps"),
        ({"kind": "exact", "weigth": 1}, "'weight' perhaps; known here: kind, weight, name, reference, tag"),
        ({"weight": 1}, "rewards.0: the section has no kind"),
    ],
)
def test_a_recipe_is_refused_with_the_nearest_right_name(given: dict[str, Any], problem: str) -> None:
    tree = {"task": {"kind": "llm.grpo"}, "model": {"path": "m"}, "data": {"train": "a.jsonl"}, "output": "o"}
    with pytest.raises(RecipeError) as refusal:
        build({**tree, "rewards": [given]}, "recipe")
    assert problem in str(refusal.value)
