"""Two runs beside each other: what differs, what is noise, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from luthier.common.cli import app
from luthier.common.errors import LuthierError
from luthier.common.evaluation.each import Each
from luthier.report.compare import compare
from luthier.report.runs import read

ERRORS = [float(at % 4) for at in range(120)]


def exit_code(*arguments: object) -> int:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)]).exit_code


def test_a_run_is_the_same_as_itself(run_at, utterances) -> None:
    one, other = (run_at(name, examples=utterances(ERRORS)) for name in ("a", "b"))
    found = compare(read(one), read(other))
    assert not found.differ
    assert found.metrics["wer"].found is not None
    assert found.curves["train/loss"].largest == 0
    assert found.recipe == found.versions == found.hashes == {}
    assert exit_code(one, other) == 0


def test_a_metric_that_is_worse_on_the_same_examples_differs(run_at, utterances) -> None:
    """A tenth of the words more are wrong: 1 of 10 in each of 120 texts."""
    one = run_at("a", examples=utterances(ERRORS), metrics={"wer": 0.15, "utterances": 120})
    other = run_at("b", examples=utterances([one + 1 for one in ERRORS]), metrics={"wer": 0.25, "utterances": 120})
    found = compare(read(one), read(other))
    assert found.differ
    assert found.metrics["wer"].found.value == pytest.approx(0.1)
    assert "utterances" not in found.metrics, "a count has no error"
    assert exit_code(one, other) == 1


def test_a_metric_that_differs_by_chance_is_noise(run_at, utterances) -> None:
    """One more error in 60 texts and one less in 59 of the others: a difference of 0.1 % that goes both ways."""
    moved = [wrong + (1 if at % 2 else -1) for at, wrong in enumerate(ERRORS)]
    moved[1] += 12  # beyond the tolerance, and still within what the draws give
    one = run_at("a", examples=utterances(ERRORS), metrics={"wer": sum(ERRORS) / 1200})
    other = run_at("b", examples=utterances(moved), metrics={"wer": sum(moved) / 1200})
    found = compare(read(one), read(other))
    assert abs(found.metrics["wer"].other - found.metrics["wer"].one) > 0.01 * found.metrics["wer"].other
    assert not found.differ


def test_without_single_examples_that_is_said_and_the_tolerance_decides(run_at) -> None:
    one, other = run_at("a", metrics={"wer": 0.200}), run_at("b", metrics={"wer": 0.201})
    found = compare(read(one), read(other))
    assert found.why_unpaired == "a and b kept no results of single examples"
    assert not found.differ
    assert compare(read(one), read(other), tolerance=0.001).differ


def test_a_metric_that_is_no_number_any_more_differs(run_at) -> None:
    one, other = run_at("a", metrics={"wer": 0.2}), run_at("b", metrics={"wer": float("nan")})
    assert compare(read(one), read(other)).metrics["wer"].differ
    assert not compare(read(other), read(other)).metrics["wer"].differ


def test_among_many_metrics_one_that_is_certain_is_still_seen(run_at) -> None:
    """Of 60 metrics one is worse for each of 50 examples: p has to fall below 0.05 / 60, which 1000 draws can't say."""
    names = [f"m{at}" for at in range(60)]

    def run(name: str, worse: float) -> Path:
        examples = [
            Each(f"a:{at}", {own: (at % 3 + (worse if own == "m7" else 0.0), 10.0) for own in names})
            for at in range(50)
        ]
        means = {own: sum(one.parts[own][0] for one in examples) / 500 for own in names}
        return run_at(name, examples=examples, metrics=means)

    found = compare(read(run("a", 0.0)), read(run("b", 1.0)))
    assert [name for name, one in found.metrics.items() if one.differ] == ["m7"]


def test_other_examples_are_not_paired(run_at, utterances) -> None:
    one, other = run_at("a", examples=utterances(ERRORS)), run_at("b", examples=utterances(ERRORS[:-1]))
    assert "different examples" in str(compare(read(one), read(other)).why_unpaired)


def test_a_curve_that_lies_higher_differs_and_one_that_crosses_does_not(run_at) -> None:
    losses = [3.0 - at * 0.02 for at in range(100)]
    one = run_at("a", losses=losses)
    higher = run_at("b", losses=[loss * 1.05 for loss in losses])
    crossing = run_at("c", losses=[loss * (1.05 if at % 2 else 0.95) for at, loss in enumerate(losses)])
    found = compare(read(one), read(higher))
    apart = found.curves["train/loss"]
    assert (apart.points, apart.step) == (100, 10)
    assert apart.largest == pytest.approx(0.15)
    assert apart.mean == pytest.approx(0.05 * sum(losses) / 100)
    assert found.differ
    assert not compare(read(one), read(crossing)).curves["train/loss"].differ


def test_what_was_made_differently_is_named_and_alone_is_no_difference(run_at) -> None:
    one, other = run_at("a"), run_at("b", learning_rate=2e-4, torch="2.15.0", digest="cd" * 32)
    found = compare(read(one), read(other))
    assert found.recipe == {"optim.learning_rate": [1e-4, 2e-4]}
    assert found.versions == {"torch": ["2.14.1", "2.15.0"]}
    assert found.hashes == {"validation: a.jsonl": ["ab" * 32, "cd" * 32]}
    assert not found.differ


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LuthierError, match="no run"):
        read(tmp_path)
