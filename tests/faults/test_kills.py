"""Runs are killed at random moments, from outside, half of the times inside a save: each goes on, and ends the same."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luthier.common.checkpoint import directory
from luthier.common.verify.rounds import SAVING, SIGNALS, STARTING, TRAINING, Rounds, newest
from luthier.common.verify.watch import Watch

pytestmark = pytest.mark.faults

SHARES = {"toy": 0.5, "whisper": 0.25, "whisper lora": 0.1, "sft": 0.1, "toy ddp": 0.05}
"""Of all kills; those that take longer are fewer."""
SMALL = {
    "toy": {SAVING: 3, TRAINING: 2, STARTING: 1, "SIGTERM": 1, "SIGINT": 1},
    "whisper": {SAVING: 2, TRAINING: 1, "SIGUSR1": 1},
}


def wanted(task: str, kills: int) -> Counter[str]:
    """Kills of a task, half of them inside saves, and signals besides."""
    if not kills:
        return Counter(SMALL[task])
    mine = max(2, -int(-kills * SHARES[task] // 1))
    half, signals = (mine + 1) // 2, max(1, mine // 20)
    starting = mine // 10
    return Counter(
        {SAVING: half, STARTING: starting, TRAINING: mine - half - starting} | dict.fromkeys(SIGNALS, signals)
    )


def test_half_of_the_kills_are_inside_saves() -> None:
    """And all tasks together have at least as many as are asked for."""
    for kills in (10, 200, 333):
        tasks = [wanted(task, kills) for task in SHARES]
        killed = sum(each[way] for each in tasks for way in (SAVING, TRAINING, STARTING))
        assert killed >= kills
        assert 2 * sum(each[SAVING] for each in tasks) >= killed


def test_every_killed_run_goes_on_and_ends_the_same(
    task: str, trial: Callable[[str], Any], kills: int, figures: dict[str, Any]
) -> None:
    """`interrupt` itself raises if a run does not go on, goes on from elsewhere than the newest whole checkpoint, or
    leaves a checkpoint that counts and is not whole."""
    rounds, asked = trial(task).rounds, wanted(task, kills)
    rounds.interrupt(trial(task).reference, asked)
    report = rounds.report
    happened = Counter(each.way for each in report.interruptions)
    assert not asked - happened
    assert not report.differences
    assert all(each.resumed is not None for each in report.interruptions)
    root = trial(task).reference.folder / "checkpoints"
    assert [directory.step_of(path) for path in directory.committed(root)][-1] == rounds.steps
    figures.setdefault("kills", []).append(
        {
            "task": task,
            "SIGKILL": sum(happened[way] for way in (SAVING, TRAINING, STARTING)),
            "of these inside a save": happened[SAVING],
            "signals": sum(happened[name] for name in SIGNALS),
            "gone on": len(report.interruptions),
            "runs ended": report.runs,
            "equal to the last bit": report.runs - len({each.where.split("/")[0] for each in report.differences}),
        }
    )


def test_most_interrupted_runs_do_not_start_over(task: str, trial: Callable[[str], Any]) -> None:
    """That they end the same would hold of runs that begin anew each time, too."""
    interruptions = trial(task).rounds.report.interruptions
    late = [each for each in interruptions if each.step > 3]
    assert late
    assert all(each.resumed for each in late if each.way != SAVING)
    for each in interruptions:
        assert each.resumed >= each.step if each.way in SIGNALS else each.resumed >= 3 * ((each.step - 1) // 3)


def test_a_signal_to_data_workers_too_saves_and_stops(make: Callable[..., Any], tmp_path: Path) -> None:
    """Schedulers send it to every process of a job, and a worker that it ended would take the run with it."""
    output = tmp_path / "run"
    rounds = Rounds(make("toy", "data.workers=2", "train.steps=400", "checkpoint.every=100"), tmp_path)
    watch, sitting = Watch(output), rounds.sit(output)
    assert watch.until(lambda: watch.step() >= 5, sitting, 600), sitting.tail()
    sitting.signal(signal.SIGTERM)
    assert sitting.exit_code(600) == 143, sitting.tail()
    assert newest(output / "checkpoints") >= 5
