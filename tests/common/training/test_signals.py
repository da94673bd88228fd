"""Signals to real processes: to one rank, to all, to a launcher, from SLURM, and Ctrl-C once and twice."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from luthier.common.training import signals

LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5, 4, 2, 1, 3]
"""16 examples: 8 batches of 2, 4 optimizer steps of 2 ranks."""


@pytest.fixture(scope="module")
def launch() -> ModuleType:
    name = "luthier_test_launch"
    if name not in sys.modules:  # one server for all files
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("launch.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Run:
    """One run, held before batch 2 until `go`; checkpoints only where it is stopped, if not said otherwise."""

    def __init__(self, launch: ModuleType, toy: Any, root: Path, name: str):
        self.launch, self.toy, self.folder, self.log = launch, toy, root / name, root / f"{name}.log"
        self.recipe = root / f"{name}.yaml"
        self.recipe.write_text(yaml.safe_dump(toy.tree(self.folder, root / "train.jsonl")))

    def start(
        self,
        environments: list[dict[str, str]],
        *overrides: str,
        torchrun: list[str] | None = None,
        do: str = "pause",
        ranks: int = 2,
    ) -> Run:
        accumulate = [f"train.devices={ranks}", f"train.accumulate={2 // ranks}", "checkpoint.every=99"]
        jobs = [
            {
                "recipe": str(self.recipe),
                "overrides": [*accumulate, *overrides],
                "actions": [{"batch": 2 * 2 // ranks, "do": do}],
            }
        ]
        self.ranks, self.launched = ranks, self.launch.start(self.log, jobs, environments, torchrun)
        return self

    def held(self) -> list[int]:
        """The processes of the ranks, once all are held."""
        files = [Path(f"{self.folder}.at-{rank}") for rank in range(self.ranks)]
        self.launch.until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def go(self) -> None:
        Path(f"{self.folder}.go").touch()

    def ended(self) -> list[int]:
        codes: list[int] = self.launched.codes()
        assert "Traceback" not in self.launched.said(), self.launched.said()
        return codes

    def saved(self) -> list[str]:
        return [path.name for path in self.toy.checkpoints(self.folder)]


@pytest.fixture
def run(launch: ModuleType, toy: Any, tmp_path: Path) -> Callable[[str], Run]:
    toy.write_data(tmp_path / "train.jsonl", LENGTHS)
    return lambda name: Run(launch, toy, tmp_path, name)


@pytest.fixture
def scontrol(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Variables of a job on a machine where `scontrol` is a script that notes its arguments and what is saved then."""
    tools, called = tmp_path / "tools", tmp_path / "called"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" $(ls {tmp_path}/*/checkpoints) >> {called}\n')
    (tools / "scontrol").chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}"}, called


STOPPED = ["step-00000003"]
"""What a run has saved that was asked to stop in its third step."""


def test_to_all_ranks_at_the_same_time_and_to_their_workers(run: Callable[[str], Run], launch: ModuleType) -> None:
    """As SLURM does, which knows no main process: the data that the step still needs comes from the workers."""
    started = run("all").start(launch.by_script(2), "data.workers=1")
    started.held()
    for pid in started.launched.pids:
        os.killpg(pid, signal.SIGTERM)
    time.sleep(0.5)
    started.go()
    assert started.ended() == [143, 143]
    assert started.saved() == STOPPED


def test_to_torchrun(run: Callable[[str], Run], launch: ModuleType) -> None:
    """SIGTERM, and Ctrl-C at its terminal, which comes to the ranks twice: directly and through torchrun."""
    started = {}
    for name, number in (("terminated", signal.SIGTERM), ("interrupted", signal.SIGINT)):
        torchrun = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
        started[number] = run(name).start([{}], torchrun=[*torchrun, f"127.0.0.1:{launch.free_port()}"])
    for number, one in started.items():
        one.held()
        if number == signal.SIGINT:
            os.killpg(one.launched.pids[0], number)
        else:
            os.kill(one.launched.pids[0], number)
    time.sleep(0.5)
    for one in started.values():
        one.go()
    for number, one in started.items():
        assert one.launched.codes() != [0]  # torchrun's own code
        for rank in (0, 1):
            assert Path(f"{one.recipe}.0.rank{rank}").read_text() == str(signals.exit_code(number))
        assert one.saved() == STOPPED


def test_slurm_requeues_after_the_checkpoint(
    run: Callable[[str], Run], launch: ModuleType, scontrol: tuple[dict[str, str], Path]
) -> None:
    """SIGUSR1 to all of two ranks; SIGTERM to one process alone; and no requeue where it isn't wished."""
    tools, called = scontrol
    two = run("two").start([{**one, **tools} for one in launch.by_slurm(2, "4711")], "train.requeue=true")
    alone = run("alone").start([{**launch.by_slurm(1, "4712")[0], **tools}], "train.requeue=true", ranks=1)
    unasked = run("unasked").start([{**launch.by_slurm(1, "4713")[0], **tools}], ranks=1)
    for started, number in ((two, signal.SIGUSR1), (alone, signal.SIGTERM), (unasked, signal.SIGUSR1)):
        for pid in started.held():
            os.kill(pid, number)
        started.go()
    assert [started.ended() for started in (two, alone, unasked)] == [[143, 143], [143], [143]]
    for started in (two, alone, unasked):
        assert started.saved() == STOPPED
        assert "hpc_ckpt" not in str(list(started.folder.rglob("*")))  # Lightning's own
    calls = sorted(line.split()[:3] for line in called.read_text().splitlines())
    assert [call[:2] for call in calls] == [["requeue", "4711"], ["requeue", "4712"]]
    assert all("step-00000003" in line for line in called.read_text().splitlines())


def test_ctrl_c_once_saves_and_twice_ends_at_once(run: Callable[[str], Run]) -> None:
    """Also where the main thread waits in C and runs no handler, as in a collective. Earlier checkpoints stay whole."""
    once = run("once").start([{}], ranks=1)
    twice = run("twice").start([{}], "checkpoint.every=1", "data.workers=1", ranks=1, do="stuck")
    for started in (once, twice):
        os.kill(started.held()[0], signal.SIGINT)
    once.go()
    assert once.ended() == [130]
    assert once.saved() == STOPPED
    time.sleep(signals.TWICE + 0.5)
    before = time.monotonic()
    os.kill(twice.launched.pids[0], signal.SIGINT)
    assert twice.ended() == [130]
    assert time.monotonic() - before < 5
    assert twice.saved() == ["step-00000001", "step-00000002"]
    assert all(twice.toy.directory.fault(path) is None for path in twice.toy.checkpoints(twice.folder))


# ------------------------------------------------------------------------------------------------ in this process


@pytest.mark.parametrize(
    ("variables", "number", "expected"),
    [
        ({"SLURM_JOB_ID": "7"}, signal.SIGUSR1, "requeue 7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2"}, signal.SIGTERM, "requeue 9_2"),
        ({"SLURM_JOB_ID": "7"}, signal.SIGINT, None),
        ({}, signal.SIGTERM, None),
    ],
)
def test_which_job_goes_back(
    scontrol: tuple[dict[str, str], Path],
    variables: dict[str, str],
    number: int,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One task of an array goes back alone; Ctrl-C is the wish to stop."""
    tools, called = scontrol
    for name, value in {**tools, **variables}.items():
        monkeypatch.setenv(name, value)
    signals.requeue(number)
    assert (called.read_text().split("/")[0].strip() if called.exists() else None) == expected


def test_a_requeue_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", "")
    signals.requeue(signal.SIGTERM)
    assert "the job 7 could not be put back into the queue" in caplog.text
