"""A run of several processes that hangs, loses one or meets an error on one ends soon, and says which and why."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import yaml

from luthier.common.errors import LuthierError
from luthier.common.training import peers, watch
from luthier.common.training.output import Output
from luthier.common.training.watch import EXIT_LOST, Watch

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch")

LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5, 4, 2, 1, 3]
"""16 examples: 8 batches of 2; rank 0 has batches 0, 2, 4, 6 and rank 1 has 1, 3, 5, 7."""
TIMEOUT = 10
"""Where a rank stands still; elsewhere nothing may take a busy machine for a hang."""
TROUBLES: dict[str, dict[str, Any]] = {
    "hangs": {"batch": 2, "ranks": [1], "do": "hang"},
    "stands": {"batch": 2, "ranks": [0], "do": "SIGSTOP"},
    "dies": {"batch": 2, "ranks": [1], "do": "SIGKILL"},
    "raises": {"batch": 2, "ranks": [1], "do": "raise"},
    "refuses": {"batch": 2, "ranks": [1], "do": "refuse"},
    "worker": {"batch": 1, "ranks": [1], "do": "kill worker"},
    "slow": {"batch": 99, "do": "hang"},
}


class Ended:
    """What a run with a trouble on one rank left."""

    def __init__(self, launched: Any, folder: Path):
        self.codes, self.seconds = launched.codes(90), 0.0
        self.said = [launched.said(rank) for rank in (0, 1)]
        self.pids, self.folder = launched.pids, folder

    @property
    def errors(self) -> list[str]:
        """The error of each rank, as it printed it."""
        return [text[text.index("error: ") :].rstrip() if "error: " in text else "" for text in self.said]


@pytest.fixture(scope="module")
def ended(toy_module: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All troubles at the same time, as most of it is waiting."""
    name = "luthier_test_launch"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("launch.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    launch: ModuleType = sys.modules[name]
    root = tmp_path_factory.mktemp("watch")
    file = toy_module.write_data(root / "train.jsonl", LENGTHS)
    launched = {}
    for trouble, action in TROUBLES.items():
        recipe = root / f"{trouble}.yaml"
        recipe.write_text(yaml.safe_dump(toy_module.tree(root / trouble, file)))
        overrides = ["train.devices=2", "checkpoint.every=1"]
        overrides += [f"train.timeout={TIMEOUT}"] if trouble in ("hangs", "stands") else []
        overrides += ["data.workers=1"] if trouble == "worker" else []
        jobs = [{"recipe": str(recipe), "overrides": overrides, "actions": [action]}]
        launched[trouble] = launch.start(root / trouble, jobs, launch.by_script(2))
    return {trouble: Ended(processes, root / trouble) for trouble, processes in launched.items()}


def saved(toy: Any, ended: Ended) -> list[str]:
    return [path.name for path in toy.checkpoints(ended.folder)]


# ------------------------------------------------------------------------------------------------ real processes


def test_a_rank_that_hangs_is_named_with_what_it_does(toy_module: Any, ended: dict[str, Ended]) -> None:
    """It hangs in Python before batch 5, so that the other one waits for it; the first rank says so and ends both."""
    found = ended["hangs"]
    assert found.codes[0] == EXIT_LOST
    assert found.codes[1] in (EXIT_LOST, -9)
    assert found.errors[1] == ""
    pid = found.pids[1]
    assert found.errors[0].startswith("error: rank 1 does not answer, and the others wait for it\n")
    where = (
        rf"given:    loading the batch after batch 3, at .+launch.py:\d+ in _do \(process {pid} on .+\), for (\d+) s"
    )
    seconds = re.search(where, found.errors[0])
    assert seconds is not None, found.errors[0]
    assert TIMEOUT <= int(seconds[1]) <= TIMEOUT + 20
    assert f"train.timeout = {TIMEOUT} s" in found.errors[0]
    assert "the same command goes on from the last checkpoint" in found.errors[0]
    assert saved(toy_module, found) == ["step-00000001", "step-00000002"]


def test_a_stopped_first_rank_is_ended_by_the_others(ended: dict[str, Ended]) -> None:
    """Not even its watching thread runs, so that it can't end itself."""
    found = ended["stands"]
    assert found.codes == [-9, EXIT_LOST]
    assert found.errors[1].startswith("error: rank 0 does not answer")
    assert f"(process {found.pids[0]} on " in found.errors[1]


def test_a_rank_that_dies_is_named(toy_module: Any, ended: dict[str, Ended]) -> None:
    found = ended["dies"]
    assert found.codes == [EXIT_LOST, -9]
    assert found.errors[0].startswith("error: rank 1 has died\n")
    assert f"(process {found.pids[1]} on " in found.errors[0]
    assert "Traceback" not in found.said[0]
    assert saved(toy_module, found) == ["step-00000001", "step-00000002"]


def test_an_error_on_one_rank_ends_the_others_with_its_message(toy_module: Any, ended: dict[str, Ended]) -> None:
    """A foreign error: a traceback on the rank that met it, one line on the other; code 1; nothing is saved."""
    found, message = ended["raises"], "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert found.codes == [1, 1]
    assert found.errors[0] == f"error: rank 1 failed: {message}"
    assert "Traceback" not in found.said[0]
    assert found.said[1].rstrip().endswith(message)
    assert saved(toy_module, found) == ["step-00000001", "step-00000002"]


def test_an_error_of_ours_on_one_rank_is_shown_without_traceback(toy_module: Any, ended: dict[str, Ended]) -> None:
    found, message = ended["refuses"], "train.jsonl:7: the batch is not of this world"
    assert found.codes == [2, 2]
    assert found.errors == [f"error: rank 1 failed: {message}", f"error: {message}"]
    assert not any("Traceback" in said for said in found.said)
    assert saved(toy_module, found) == ["step-00000001", "step-00000002"]


def test_a_killed_data_worker_is_told_in_our_words(ended: dict[str, Ended]) -> None:
    found = ended["worker"]
    assert found.codes == [2, 2]
    for error, start in zip(found.errors, ("error: rank 1 failed: ", "error: "), strict=True):
        assert error.startswith(f"{start}data.workers: a data worker was killed\n")
        assert "\n  given:    " in error  # in one of the ways in which torch notices it
        assert "lower data.workers" in error
        assert "the same command goes on from the last checkpoint" in error
    assert not any("Traceback" in said for said in found.said)


def test_a_run_without_trouble_leaves_nothing(ended: dict[str, Ended]) -> None:
    assert ended["slow"].codes == [0, 0]
    assert list((ended["slow"].folder / ".ranks").iterdir()) == []


def test_no_process_is_left(ended: dict[str, Ended]) -> None:
    """Ranks or their data workers, all of which write their output below this folder."""
    folder = str(ended["worker"].folder.parent)
    assert not [process for process in psutil.process_iter() if folder in open_files(process)]


def open_files(process: psutil.Process) -> str:
    try:
        return " ".join(os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------ verdicts


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    for module in (watch, peers):
        monkeypatch.setattr(module.time, "monotonic", made.monotonic)
    yield made
    monkeypatch.undo()


class Others:
    """The files of other ranks, written by hand, and the watch of rank 0 that reads them."""

    def __init__(self, folder: Path, ranks: int):
        self.watch = Watch(Output(folder, sitting="now"), 0, ranks, timeout=100)
        self.watch.folder.mkdir()
        self.moves = dict.fromkeys(range(1, ranks), 0)

    def write(self, rank: int, passed: int, moved: bool = True, **changed: Any) -> None:
        self.moves[rank] += moved
        record = {
            "sitting": "now", "rank": rank, "pid": os.getpid(), "began": psutil.Process().create_time(),
            "machine": peers.machine(), "host": "there", "passed": passed, "moves": self.moves[rank],
            "doing": "saving step 9", "at": "", "waits": False, "written": time.time_ns(), "error": None,
            "verdict": None,
        }  # fmt: skip
        (self.watch.folder / f"{rank}.json").write_text(json.dumps({**record, **changed}))

    def look(self) -> watch.Verdict | None:
        self.watch._write()
        for peer in self.watch._others:
            peer.read()
        return self.watch._look()


def test_of_those_that_stand_still_the_one_behind_is_at_fault(tmp_path: Path, clock: Clock) -> None:
    others = Others(tmp_path, 4)
    passed = watch._marks.passed
    for rank, ahead in ((1, 1), (2, 0), (3, 0)):
        others.write(rank, passed + ahead, waits=rank == 2)
    assert others.look() is None
    clock.now += 101
    for rank, ahead in ((1, 1), (2, 0), (3, 0)):
        others.write(rank, passed + ahead, moved=False, waits=rank == 2)
    watch._marks.passed += 1  # not a move: this rank stands at a place behind the others
    found = others.look()
    watch._marks.passed -= 1
    assert found is not None
    assert (found.rank, found.code) == (3, EXIT_LOST)  # 2 is as far, but waits in a collective
    assert "rank 3 does not answer" in found.say
    assert "saving step 9 (process" in found.say


def test_while_one_gets_on_nobody_hangs(tmp_path: Path, clock: Clock) -> None:
    """Such as an evaluation that takes one rank longer than the timeout, batch by batch."""
    others = Others(tmp_path, 2)
    for _ in range(5):
        others.write(1, 3)
        clock.now += 60
        assert others.look() is None
    clock.now += 101
    others.write(1, 3, moved=False)
    assert others.look() is not None


def test_another_machine_counts_as_lost_when_its_file_is_not_written(tmp_path: Path, clock: Clock) -> None:
    """A process of that number here says nothing about it."""
    others = Others(tmp_path, 2)
    others.watch.timeout = 1000
    others.write(1, 3, machine="another", pid=2**22 + 1)
    assert others.look() is None
    clock.now += peers.SILENT - 1
    assert others.look() is None
    clock.now += 2
    found = others.look()
    assert found is not None
    assert (found.rank, found.code) == (1, EXIT_LOST)
    assert "rank 1 has died" in found.say


def test_a_file_of_an_earlier_start_says_nothing(tmp_path: Path, clock: Clock) -> None:
    others = Others(tmp_path, 2)
    others.write(1, 3, sitting="before", pid=2**22 + 1, error=["old", 1])
    clock.now += 50
    assert others.look() is None


def test_a_rank_that_has_finished_is_not_missed(tmp_path: Path, clock: Clock) -> None:
    others = Others(tmp_path, 2)
    others.write(1, 3)
    assert others.look() is None
    (others.watch.folder / "1.json").unlink()
    clock.now += 1000
    assert others.look() is None


def test_an_error_is_told_when_its_process_had_time_to_tell_it(tmp_path: Path, clock: Clock) -> None:
    others = Others(tmp_path, 2)
    others.write(1, 3, error=["bad weather", 2])
    assert others.look() is None
    clock.now += watch.PATIENCE + 1
    found = others.look()
    assert found == watch.Verdict(1, "rank 1 failed: bad weather", 2)


def test_what_another_has_found_out_is_taken_over(tmp_path: Path, clock: Clock) -> None:
    """So that its own end is not mistaken for the cause."""
    others = Others(tmp_path, 3)
    others.write(1, 3, pid=2**22 + 1, verdict={"rank": 2, "say": "rank 2 has died", "code": 75})
    others.write(2, 3, pid=2**22 + 1)
    clock.now += 50
    assert others.look() == watch.Verdict(2, "rank 2 has died", 75)


# ------------------------------------------------------------------------------------------------ one process


def test_one_process_is_not_watched(tmp_path: Path) -> None:
    with Watch(Output(tmp_path), 0, 1, timeout=1) as alone:
        assert not alone._thread.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_errors_are_put_into_our_words_and_others_left_alone(tmp_path: Path) -> None:
    with pytest.raises(LuthierError, match="a data worker was killed"), Watch(Output(tmp_path), 0, 1, timeout=1):
        raise RuntimeError("DataLoader worker (pid(s) 17) exited unexpectedly")
    with pytest.raises(ConnectionError, match="own server"), Watch(Output(tmp_path), 0, 1, timeout=1):
        raise ConnectionResetError("of a user's own server")
    with pytest.raises(RuntimeError, match="something else"), Watch(Output(tmp_path), 0, 1, timeout=1):
        raise RuntimeError("something else")
