"""Processes that torchrun, SLURM or Lightning has started agree on the folder and the checkpoint, or end together."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import distributed

from luthier.common.checkpoint import directory
from luthier.common.errors import LuthierError, RecipeError
from luthier.common.training import ranks
from luthier.common.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch")

LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5, 4, 2, 1, 3]
"""16 examples: 8 batches of 2, 4 optimizer steps of 2 ranks."""
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def launch() -> ModuleType:
    name = "luthier_test_launch"
    if name not in sys.modules:  # one server for all files
        spec = importlib.util.spec_from_file_location(name, HERE / "launch.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def job(toy: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A job for `launch`: the recipe `NAME.yaml` with output `NAME`, on two processes."""
    file = toy.write_data(tmp_path / "train.jsonl", LENGTHS)

    def made(name: str, *overrides: str, **actions: Any) -> dict[str, Any]:
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(toy.tree(tmp_path / name, file)))
        return {"recipe": str(recipe), "overrides": ["checkpoint.every=1", "train.devices=2", *overrides], **actions}

    return made


def once(toy: Any, tmp_path: Path, name: str, steps: int) -> Path:
    """The run as it is after some optimizer steps on one process (2 batches each, as 2 ranks have)."""
    file = tmp_path / "train.jsonl"
    recipe = toy.make(tmp_path / name, file, "train.accumulate=2", "checkpoint.every=1", "checkpoint.keep_last=2")
    train(recipe, [toy.At(2 * steps - 1, toy.terminate)] if steps < 4 else [])
    return tmp_path / name


def equal(toy: Any, folder: Path, whole: Path) -> None:
    """The curve has every step once, and the weights are those of the run that was not stopped."""
    assert [step for step, _ in toy.curve(folder)] == [1, 2, 3, 4]
    for name, value in toy.weights(whole).items():
        torch.testing.assert_close(toy.weights(folder)[name], value, rtol=0, atol=1e-6)


def codes(job: dict[str, Any], number: int) -> list[str]:
    """Exit codes of rank 0 and 1 for the job with this number in a launch."""
    return [Path(f"{job['recipe']}.{number}.rank{rank}").read_text() for rank in (0, 1)]


def unsealed(folder: Path, step: int) -> None:
    """The last save was killed when it was sealed but not yet renamed."""
    last = folder / "checkpoints" / directory.name(step)
    last.rename(last.with_name(last.name + directory.PARTIAL))


# ------------------------------------------------------------------------------------------------ torchrun


def test_torchrun(toy: Any, launch: ModuleType, job: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Everything that the first rank may find in the folder."""
    jobs = [
        job("between"),
        job("broken"),
        job("taken", "train.fresh=true"),
        job("foreign"),
        job("miscounted", "train.devices=1"),
        job("new"),
    ]
    whole = once(toy, tmp_path, "whole", 4)
    unsealed(once(toy, tmp_path, "between", 3), 3)
    (once(toy, tmp_path, "broken", 3) / "checkpoints" / "step-00000003" / "run.json").unlink()
    shutil.copytree(whole, tmp_path / "taken", symlinks=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("years of work")

    torchrun = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{launch.free_port()}"]
    launched = launch.start(tmp_path / "log", jobs, [{}], torchrun)
    assert launched.codes() == [0], launched.said()
    said = launched.said()
    good, refused = ["0", "0"], ["2", "2"]
    expected = [good, good, good, refused, refused, good]
    assert [codes(entry, number) for number, entry in enumerate(jobs)] == expected
    assert f"resuming from {tmp_path}/between/checkpoints/step-00000003\n" in said
    assert f"resuming from {tmp_path}/broken/checkpoints/step-00000002\n" in said
    assert (tmp_path / "broken" / "checkpoints" / "step-00000003.broken" / "BROKEN").is_file()
    for name in ("between", "broken", "taken-2", "new"):
        equal(toy, tmp_path / name, whole)
    assert not (tmp_path / "taken-3").exists()
    assert toy.position(tmp_path / "taken")["step"] == 4
    # What was refused is told once, by the first rank.
    assert said.count("error: ") == 2
    assert said.count("the folder is not empty and holds no run") == 1
    assert said.count("the launcher has started another number of processes") == 1
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.tex"]
    assert not (tmp_path / "miscounted").exists()


def test_two_nodes_killed_and_started_again(
    toy: Any, launch: ModuleType, job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """All processes are killed at step 3, before its save; one more save is left unsealed by hand."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    nodes = ("train.devices=1", "train.nodes=2")

    def start(*actions: dict[str, Any]) -> Any:
        torchrun = [*options, f"127.0.0.1:{launch.free_port()}"]
        return launch.start(tmp_path / "log", [job("run", *nodes, actions=actions)], [{}, {}], torchrun)

    first = start({"batch": 2, "do": "pause"})
    launch.until(lambda: all((tmp_path / f"run.at-{rank}").exists() for rank in (0, 1)))
    for pid in first.pids:
        os.killpg(pid, signal.SIGKILL)
    assert first.codes() == [-signal.SIGKILL] * 2
    unsealed(tmp_path / "run", 2)
    second = start()
    assert second.codes() == [0, 0], second.said()
    assert f"resuming from {tmp_path}/run/checkpoints/step-00000002\n" in second.said()
    equal(toy, tmp_path / "run", once(toy, tmp_path, "whole", 4))
    assert not any((tmp_path / "run" / ".ranks").iterdir())


# ------------------------------------------------------------------------------------------------ Lightning


def test_what_lightning_starts_learns_folder_and_checkpoint(
    toy: Any, launch: ModuleType, job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """One launch: a killed save and a new folder; a signal to the main process; then the second rank is killed."""
    jobs = [
        job("between", "train.fresh=false"),
        job("stopped", actions=[{"batch": 1, "do": "SIGTERM", "ranks": [0]}]),
        job("lost", actions=[{"batch": 1, "do": "SIGKILL", "ranks": [1]}]),
    ]
    unsealed(once(toy, tmp_path, "between", 3), 3)
    launched = launch.start(tmp_path / "log", jobs, [{}])
    assert launched.codes(120) == [75], launched.said()
    said = launched.said()
    assert [codes(jobs[number], number) for number in (0, 1)] == [["0", "0"], ["143", "143"]]
    assert f"resuming from {tmp_path}/between/checkpoints/step-00000003\n" in said
    equal(toy, tmp_path / "between", once(toy, tmp_path, "whole", 4))
    assert [path.name for path in toy.checkpoints(tmp_path / "stopped")] == ["step-00000001", "step-00000002"]
    assert said.count("error: ") == 1
    assert "error: rank 1 has died\n  given:    it ended by SIGKILL; last heard of: " in said


# ------------------------------------------------------------------------------------------------ the lock


def test_the_lock_goes_with_a_killed_process_and_not_with_its_workers(
    toy: Any, launch: ModuleType, job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A data worker that has not yet noticed holds no lock; a process that lives does."""
    alone = ("train.devices=1", "train.accumulate=2", "data.workers=1")
    first = launch.start(tmp_path / "first", [job("run", *alone, actions=[{"batch": 5, "do": "pause"}])], [{}])
    launch.until((tmp_path / "run.at-0").exists)
    second = launch.start(tmp_path / "second", [job("run", *alone)], [{}])
    assert second.codes() == [2]
    assert "another run is writing to this output" in second.said()
    assert f"process {first.pids[0]} on " in second.said()
    os.kill(first.pids[0], signal.SIGKILL)  # and not its worker, which sees it within 5 s
    assert first.codes() == [-signal.SIGKILL]
    third = launch.start(tmp_path / "third", [job("run", *alone)], [{}])
    assert third.codes() == [0], third.said()
    equal(toy, tmp_path / "run", once(toy, tmp_path, "whole", 4))


def test_a_file_system_without_locks_is_told_as_such(
    toy: Any, job: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    job("run")
    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(LuthierError, match="the file system can't lock files") as caught:
        once(toy, tmp_path, "run", 4)
    for part in (str(tmp_path / "run"), "Function not implemented", "set output on another file system"):
        assert part in str(caught.value)


# ------------------------------------------------------------------------------------------------ in one process


def trainer(devices: int, nodes: int) -> Any:
    return SimpleNamespace(num_devices=devices, num_nodes=nodes)


def test_several_machines_need_a_launcher() -> None:
    with pytest.raises(RecipeError, match="several machines need a launcher"):
        ranks.join(trainer(2, 2), 5)
    ranks.join(trainer(2, 1), 5)  # Lightning will start the second


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_asked(
    launch: ModuleType, job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    first = launch.by_script(2)[0]
    launched = launch.start(tmp_path / "log", [job("run", "train.timeout=1")], [first])
    assert launched.codes(30) == [2]
    assert "error: rank 0: the 2 processes of the run did not all come together" in launched.said()
    assert not (tmp_path / "run").exists()


def test_without_connection_a_process_decides_alone() -> None:
    assert not distributed.is_initialized()
    assert ranks.agree(lambda: "mine") == "mine"
