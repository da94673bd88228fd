"""`luthier verify-resume`: a task that resumes exactly passes, and one that forgets something is found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luthier.common.cli import main

pytestmark = pytest.mark.faults


@pytest.fixture
def verify(make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`verify(kind, *arguments)`: (exit code, all that was printed, in one line)."""

    def run(kind: str, *arguments: str) -> tuple[int, str]:
        file = tmp_path / "recipe.yaml"
        file.write_text(make("toy", f"task.kind={kind}", f"output={tmp_path / 'runs' / 'mine'}").dump())
        (tmp_path / "runs").mkdir(exist_ok=True)
        with pytest.raises(SystemExit) as ended:
            main(["verify-resume", str(file), *arguments])
        return int(ended.value.code or 0), " ".join("".join(capsys.readouterr()).split())

    return run


def test_an_exact_task_passes_and_leaves_nothing(verify: Callable[..., Any], tmp_path: Path) -> None:
    code, printed = verify("test.toy", "--kills", "3", "--steps", "16")
    assert code == 0
    assert "equal to the last bit in losses, weights, optimizer and counters" in printed
    assert "of 16 steps, interrupted" in printed
    for way in ("SIGKILL inside a save", "SIGKILL in training", "SIGTERM"):
        assert way in printed
    assert not list((tmp_path / "runs").iterdir())


def test_a_task_that_forgets_is_found_out(verify: Callable[..., Any], tmp_path: Path) -> None:
    """Its second sitting begins to count anew. SIGTERM comes third; the first two may fall before the first save."""
    code, printed = verify("test.forgetful", "--kills", "3", "--steps", "16")
    assert code == 2
    assert "not equal" in printed
    assert "curves.csv: train/gradient_norm at step" in printed
    assert (next((tmp_path / "runs").iterdir()) / "uninterrupted" / "curves.csv").is_file()


def test_a_recipe_that_fails_is_told_with_what_it_printed(verify: Callable[..., Any], tmp_path: Path) -> None:
    code, printed = verify("test.toy", "data.train=missing.jsonl")
    assert code == 2
    assert "the run failed without any interruption (exit code 2)" in printed
    assert "missing.jsonl" in printed
    assert (next((tmp_path / "runs").iterdir()) / "uninterrupted.log").is_file()


def test_several_nodes_are_refused(verify: Callable[..., Any]) -> None:
    code, printed = verify("test.toy", "train.nodes=2")
    assert code == 2
    assert "train.nodes" in printed
