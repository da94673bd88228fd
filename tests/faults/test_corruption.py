"""Every file of a real checkpoint is damaged in every way: each time it is found, and the one before is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luthier.common.checkpoint import directory
from luthier.common.verify import compare

pytestmark = pytest.mark.faults


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def emptied(_: bytes) -> bytes:
    return b""


def flipped(content: bytes) -> bytes:
    """One bit, somewhere."""
    at = random.Random(len(content)).randrange(8 * len(content))
    damaged = bytearray(content)
    damaged[at // 8] ^= 1 << at % 8
    return bytes(damaged)


DAMAGES = (cut, emptied, flipped)


def copied(trial: Any, to: Path) -> tuple[Path, Path, Path]:
    """(the finished run copied, its newest checkpoint, the one before)"""
    shutil.copytree(trial.reference.folder, to, symlinks=True)
    before, newest = directory.committed(to / "checkpoints")[-2:]
    return to, newest, before


def test_each_damage_of_each_file_is_found(
    task: str, trial: Callable[[str], Any], tmp_path: Path, figures: dict[str, Any]
) -> None:
    _, newest, before = copied(trial(task), tmp_path / "run")
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert {"manifest.json", "COMMIT", "recipe.yaml", "run.json", "metrics.json"} <= {path.name for path in files}
    assert {path.relative_to(newest).parts[0] for path in files} >= {"model", "state"}
    found = 0
    for path in files:
        content = path.read_bytes()
        assert content, path
        for damage in DAMAGES:
            path.write_bytes(damage(content))
            reason = directory.fault(newest)
            name = str(path.relative_to(newest))
            assert reason, f"{name} {damage.__name__}"
            assert name in reason or name == "COMMIT", f"{name} {damage.__name__}: {reason}"
            assert directory.newest_valid(newest.parent, mend=False) == before, f"{name} {damage.__name__}"
            found += 1
        path.unlink()
        assert directory.fault(newest), f"{path} deleted"
        assert directory.newest_valid(newest.parent, mend=False) == before
        path.write_bytes(content)
    assert directory.newest_valid(newest.parent, mend=False) == newest
    assert found == len(DAMAGES) * len(files)
    figures.setdefault("corruption", []).append(
        {"task": task, "files": len(files), "damages (cut, emptied, one bit flipped)": found, "found": found}
    )


def test_a_file_of_another_step_is_found(task: str, trial: Callable[[str], Any], tmp_path: Path) -> None:
    """A shard of one step in the folder of another would load without a word."""
    _, newest, before = copied(trial(task), tmp_path / "run")
    swapped = 0
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        other, content = before / path.relative_to(newest), path.read_bytes()
        if other.read_bytes() != content:
            path.write_bytes(other.read_bytes())
            assert directory.newest_valid(newest.parent, mend=False) == before, path
            path.write_bytes(content)
            swapped += 1
    assert swapped >= 5  # weights, state, record, manifest and COMMIT at least


def test_a_run_goes_on_from_the_one_before(task: str, trial: Callable[[str], Any], tmp_path: Path) -> None:
    """And the broken one is named and set aside, and the end is the same."""
    run, newest, before = copied(trial(task), tmp_path / "run")
    weights = next(iter(sorted((newest / "model").glob("*.safetensors"))))
    weights.write_bytes(flipped(weights.read_bytes()))
    sitting = trial(task).rounds.sit(run)
    assert sitting.exit_code(600) == 0, sitting.tail()
    printed = sitting.printed()
    assert f"broken checkpoint, renamed to {newest.name}.broken" in printed
    assert f"model/{weights.name} has other contents than were written" in printed
    assert f"resuming from {before}" in printed
    assert (newest.parent / f"{newest.name}.broken" / "BROKEN").is_file()
    assert directory.fault(newest) is None  # saved again
    ended = trial(task).reference.folder
    assert not compare.checkpoints_differ(ended / "checkpoints" / newest.name, newest)
    assert not compare.curves_differ(ended, run)
