"""A disk that fills up in the middle of a save, or can't be written: the last checkpoint stays, and the run goes on."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luthier.common.checkpoint import directory
from luthier.common.verify import compare
from luthier.common.verify.rounds import newest_whole
from luthier.common.verify.watch import Watch

pytestmark = pytest.mark.faults

TASK = "whisper"
"""Of a toy's checkpoint nearly every file fits in one block."""
PATIENCE = 600.0


def stopped(trial: Any, run: Path, step: int) -> int:
    """A run that was stopped by SIGTERM after a step; gives the step that was saved."""
    watch, sitting = Watch(run), trial.rounds.sit(run)
    assert watch.until(lambda: watch.step() >= step, sitting, PATIENCE), sitting.tail()
    sitting.signal(signal.SIGTERM)
    assert sitting.exit_code(PATIENCE) == 143, sitting.tail()
    return newest_whole(run / "checkpoints")


def ended_the_same(trial: Any, run: Path) -> None:
    sitting = trial.rounds.sit(run)
    assert sitting.exit_code(PATIENCE) == 0, sitting.tail()
    name = directory.name(trial.rounds.steps)
    there = trial.reference.folder
    assert not compare.checkpoints_differ(there / "checkpoints" / name, run / "checkpoints" / name)
    assert not compare.curves_differ(there, run)


def test_a_disk_that_fills_up_during_a_save(
    trial: Callable[[str], Any], disk: Callable[[int], Any], kills: int, figures: dict[str, Any]
) -> None:
    """As soon as a save begins, all space is taken but a part of what it still needs."""
    done = trial(TASK)
    one = directory.committed(done.reference.folder / "checkpoints")[-1]
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in one.rglob("*") if path.is_file())
    small, choice = disk(8 * size), random.Random(0)
    points = 20 if kills else 2
    run = small.path / "run"
    saved = stopped(done, run, 4)
    shutil.copytree(run, small.path.parent / "kept", symlinks=True)
    hit, tries = 0, 0
    while hit < points:
        assert tries < 3 * points, "the disk was full too late in most tries"
        leave = int(size * choice.uniform(0, 0.9) * (points - hit) / points)
        tries += 1
        shutil.rmtree(run)
        shutil.copytree(small.path.parent / "kept", run, symlinks=True)
        watch, sitting = Watch(run), done.rounds.sit(run)
        assert watch.until(lambda: watch.saving() is not None, sitting, PATIENCE), sitting.tail()  # noqa: B023
        small.fill(leave)
        code = sitting.exit_code(PATIENCE)
        if code == 0:  # the space that was left has been enough
            small.free()
            continue
        hit += 1
        printed = sitting.printed()
        assert code == 2, sitting.tail()
        assert "Traceback" not in printed, printed
        assert "could not be written" in printed or "no room for a checkpoint" in printed, printed
        assert "free some space" in printed
        last = newest_whole(run / "checkpoints")
        assert last >= saved
        assert all(directory.fault(path) is None for path in directory.committed(run / "checkpoints"))
        small.free()
        ended_the_same(done, run)
    figures.setdefault("full disk", []).append(
        {"task": TASK, "points of a save": hit, "last checkpoint whole": hit, "gone on and equal": hit}
    )


def test_an_output_that_can_not_be_written(trial: Callable[[str], Any], disk: Callable[[int], Any]) -> None:
    done = trial("toy")
    small = disk(4 << 20)
    run = small.path / "run"
    saved = stopped(done, run, 7)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    small.read_only(True)
    for output in (run, small.path / "another"):
        sitting = done.rounds.sit(output)
        assert sitting.exit_code(PATIENCE) == 2, sitting.tail()
        assert "Traceback" not in sitting.printed()
        assert "Read-only file system" in sitting.printed()
        assert str(output) in sitting.printed()
    small.read_only(False)
    assert newest_whole(run / "checkpoints") == saved
    assert all(path.read_bytes() == content for path, content in before.items())
    ended_the_same(done, run)
