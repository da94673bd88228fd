"""Checkpoints that are sealed while the training goes on."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from luthier.common.checkpoint import directory
from luthier.common.checkpoint.position import Position
from luthier.common.checkpoint.save import Saver
from luthier.common.errors import CheckpointError
from luthier.common.recipe import CheckpointSection
from luthier.common.training.run import train

LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5]
ASYNCHRONOUS = "checkpoint.asynchronous=true"


@pytest.fixture
def make(toy: Any, tmp_path: Path) -> Callable[..., Any]:
    file = toy.write_data(tmp_path / "train.jsonl", LENGTHS * 2)
    options = ("optim.name=adamw", "task.dropout=0.3", "checkpoint.every=2")
    return lambda name, *overrides: toy.make(tmp_path / name, file, *options, *overrides)


def states(folder: Path) -> dict[str, Any]:
    """Weights, optimizer and schedule of every step, by folder name."""
    found = {}
    for path in directory.committed(folder / "checkpoints"):
        state = torch.load(path / "state" / "trainer.pt", weights_only=True)
        found[path.name] = {key: state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}
    return found


def same(here: Any, there: Any) -> bool:
    if isinstance(here, torch.Tensor):
        return torch.equal(here, there)
    if isinstance(here, dict):
        return here.keys() == there.keys() and all(same(here[key], there[key]) for key in here)
    if isinstance(here, list | tuple):
        return len(here) == len(there) and all(same(*pair) for pair in zip(here, there, strict=True))
    return bool(here == there)


def test_the_checkpoints_are_those_of_a_run_that_waits(make: Callable[..., Any], tmp_path: Path) -> None:
    train(make("waits"))
    train(make("goes-on", ASYNCHRONOUS))
    expected, found = states(tmp_path / "waits"), states(tmp_path / "goes-on")
    assert len(expected) >= 4
    assert same(found, expected)


class Weights(Callback):
    """Keeps the weights after each step, and lets seals go on only when the step after has begun."""

    def __init__(self) -> None:
        self.after: dict[int, torch.Tensor] = {}
        self.stepped = threading.Event()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx and batch_idx % 2 == 1:  # saved after every 2 steps: the one after a save is about to run
            self.stepped.set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after[batch_idx + 1] = pl_module.model.first.weight.detach().clone()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.stepped.set()


def test_a_slow_seal_holds_the_step_it_was_begun_at(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, commit, waited = Weights(), directory.commit, []

    def slow(folder: Path, target: Path) -> None:
        weights.stepped.clear()
        waited.append(weights.stepped.wait(20))
        commit(folder, target)

    monkeypatch.setattr(directory, "commit", slow)
    monkeypatch.setattr("luthier.common.training.after_step.AfterStep.on_train_end", _release(weights))
    train(make("out", ASYNCHRONOUS), [weights])
    assert waited
    assert all(waited)  # the training did go on while a seal was under way
    found = states(tmp_path / "out")
    assert len(found) >= 4
    for name, state in found.items():
        step = int(name.removeprefix("step-"))
        assert torch.equal(state["state_dict"]["model.first.weight"], weights.after[step])


def _release(weights: Weights) -> Any:
    from luthier.common.training.after_step import AfterStep

    end = AfterStep.on_train_end

    def on_train_end(self: Any, *arguments: Any) -> None:
        weights.stepped.set()
        end(self, *arguments)

    return on_train_end


def test_a_seal_that_fails_is_told_and_leaves_nothing_half(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, calls = directory.commit, []

    def full(folder: Path, target: Path) -> None:
        calls.append(target.name)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(folder, target)

    monkeypatch.setattr(directory, "commit", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(make("out", ASYNCHRONOUS))
    assert [path.name for path in directory.committed(tmp_path / "out" / "checkpoints")] == [calls[0]]
    assert not list((tmp_path / "out" / "checkpoints").glob("*.tmp"))
    monkeypatch.setattr(directory, "commit", commit)
    train(make("whole"))
    train(make("out", ASYNCHRONOUS))
    assert same(states(tmp_path / "out"), states(tmp_path / "whole"))


@pytest.mark.parametrize("before", [True, False])
def test_a_disk_without_room_is_known_before_anything_is_written(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    if not before:
        train(make("out", "train.epochs=0.5"))
    saved = directory.committed(tmp_path / "out" / "checkpoints") if not before else []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match="no room for a checkpoint"):
        train(make("out" if before else "other"))
    if before:
        assert list((tmp_path / "out" / "checkpoints").iterdir()) == []
    assert all(directory.fault(path) is None for path in saved)


def test_a_rank_that_fails_leaves_the_folder_to_the_one_that_writes_it(tmp_path: Path) -> None:
    """Or the first would tell of a missing folder, and not of what happened to the other."""
    saver = Saver(tmp_path, {}, {}, CheckpointSection())
    writing = tmp_path / (directory.name(2) + directory.PARTIAL)
    writing.mkdir()

    def barrier(_name: str) -> None:
        raise RuntimeError("the others have gone")

    trainer: Any = SimpleNamespace(is_global_zero=False, strategy=SimpleNamespace(barrier=barrier))
    task: Any = SimpleNamespace(gathered=lambda to_save: nullcontext())
    with pytest.raises(RuntimeError, match="the others have gone"):
        saver.save(trainer, task, Position(step=2), None)
    assert writing.is_dir()


def test_a_lost_data_worker_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    """torch raises by a signal, wherever the process is: here while it looks for a file that is not there."""
    killed = "DataLoader worker (pid 7) is killed by signal: Killed."

    def barrier(_name: str) -> None:
        try:
            (tmp_path / "none").read_text()
        except FileNotFoundError:
            raise RuntimeError(killed)  # noqa: B904  (a signal has no cause)

    saver = Saver(tmp_path, {}, {}, CheckpointSection())
    trainer: Any = SimpleNamespace(is_global_zero=False, strategy=SimpleNamespace(barrier=barrier))
    task: Any = SimpleNamespace(gathered=lambda to_save: nullcontext())
    with pytest.raises(RuntimeError, match="killed by signal"):
        saver.save(trainer, task, Position(step=2), None)
