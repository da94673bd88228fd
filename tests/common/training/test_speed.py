"""An estimate's assumed speed gives way to that of the first steps: by hand, and in a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from luthier.common.errors import RecipeError
from luthier.common.training import speed
from luthier.common.training.run import train

TIME = {
    "seconds": 1000.0, "steps": 100, "cost": 5000.0, "operations": 1e9, "measured": False, "basis": "h100: 40% of it",
    "price": 8.0, "price_with_tries": 24.0,
}  # fmt: skip
"""10 s a step of 50 units, so 0.2 s a unit."""


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("luthier")
    before, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = before


def estimate(file: Path, **changes: Any) -> str:
    file.write_text(json.dumps({"kind": "test.toy", "devices": 1, "time": {**TIME, **changes}}))
    return str(file)


def run(one: speed.Speed, seconds: float, cost: float, steps: int, first: int = 1) -> None:
    for step in range(first, first + steps):
        one(step, 500.0 if step < first + speed.WARMUP else seconds, cost)


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / speed.KEPT).read_text())
    return found["time"]


def test_the_true_speed_replaces_the_assumed_one(tmp_path: Path, warnings, capsys) -> None:
    one = speed.Speed(estimate(tmp_path / "plan.json"), tmp_path, 100)
    run(one, 6.0, 25.0, 12)
    assert kept(tmp_path) == TIME, "the tenth timed step is still to come"
    one(13, 6.0, 25.0)
    # 6 s for 25 units are 0.24 s a unit: 5000 units take 1200 s, and a step of 50 takes 12. 87 steps are left.
    found = kept(tmp_path)
    assert found["seconds"] == pytest.approx(1200)
    assert (found["price"], found["price_with_tries"]) == (pytest.approx(9.6), pytest.approx(28.8))
    assert found["measured"]
    assert found["basis"] == "10 steps of the run"
    assert found["assumed"] == TIME
    assert "speed: 12 s a step, so 17:24 min left without evaluation; 9.60 for all of it" in capsys.readouterr().out
    assert not warnings.records, "1.2 times is what an estimate is"
    run(one, 600.0, 25.0, 40, first=14)
    assert kept(tmp_path) == found, "once"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (30.0, "3.0 times slower than estimated: 50:00 min in all, without evaluation, not 16:40 min (h100: 40%"),
        (4.0, "2.5 times faster than estimated: 6:40 min in all"),
        (21.0, "2.1 times slower"),
        (19.5, None),
        (5.5, None),
    ],
)
def test_over_two_times_is_said(tmp_path: Path, warnings, seconds: float, said: str | None) -> None:
    run(speed.Speed(estimate(tmp_path / "plan.json"), tmp_path, 100), seconds, 50.0, 13)
    assert [one.levelno for one in warnings.records] == ([logging.WARNING] if said else [])
    assert (said or "") in warnings.text


def test_a_run_that_goes_on_says_it_once(tmp_path: Path, warnings) -> None:
    given = estimate(tmp_path / "plan.json")
    run(speed.Speed(given, tmp_path, 100), 30.0, 50.0, 5)  # stopped before it was known
    run(speed.Speed(given, tmp_path, 100), 30.0, 50.0, 13, first=6)
    assert len(warnings.records) == 1
    (tmp_path / "plan.json").unlink()  # the run has its own
    run(speed.Speed(given, tmp_path, 100), 90.0, 50.0, 13, first=19)
    assert len(warnings.records) == 1


def test_a_short_run_says_it_at_its_end(tmp_path: Path, capsys) -> None:
    run(speed.Speed(estimate(tmp_path / "plan.json"), tmp_path, 5), 12.0, 50.0, 5)
    assert kept(tmp_path)["basis"] == "2 steps of the run"
    assert kept(tmp_path)["seconds"] == pytest.approx(60), "of 5 steps, not of the 100 that were estimated"
    assert "so 0 s left" in capsys.readouterr().out


def test_a_run_has_its_estimate(toy: ModuleType, tmp_path: Path, warnings) -> None:
    data = toy.write_data(tmp_path / "train.jsonl", [3, 2, 4, 3, 2, 5, 3, 2] * 4)
    given = estimate(tmp_path / "plan.json", steps=16, cost=104.0)
    train(toy.make(tmp_path / "run", data, f"track.estimate={given}"))
    found = kept(tmp_path / "run")
    assert 0 < found["seconds"] < 500, "a millisecond a step, not a minute"
    assert "times faster than estimated" in warnings.text


@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("{}", "no estimate"), ("[1]", "no estimate"), ("x", "no estimate")]
)
def test_what_is_no_estimate_is_refused_before_anything(
    toy: ModuleType, tmp_path: Path, text: str | None, why: str
) -> None:
    data = toy.write_data(tmp_path / "train.jsonl", [3, 2])
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RecipeError, match=why) as caught:
        train(toy.make(tmp_path / "run", data, f"track.estimate={tmp_path / 'plan.json'}"))
    assert "track.estimate" in str(caught.value)
    assert not (tmp_path / "run").exists()
