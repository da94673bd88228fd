"""The toy task as a kind of its own, known for the time of a test, and trainings of it on two processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from luthier.common import kinds

FILE = Path(__file__).with_name("toy.py")
LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("luthier_toy_module", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for pydantic, and so that workers can be sent its classes
    spec.loader.exec_module(module)
    return module


def _known(toy: ModuleType, patch: pytest.MonkeyPatch) -> None:
    for name, module in toy.modules().items():
        patch.setitem(sys.modules, name, module)
    patch.setitem(kinds.modules(), toy.KIND, toy.MODULE)
    patch.setattr(os, "fsync", lambda _: None)
    patch.setattr(torch, "set_num_threads", lambda _: None)  # it would outlast the test
    patch.delenv("LUTHIER_OUTPUT", raising=False)


@pytest.fixture(scope="session")
def toy_module() -> ModuleType:
    return _load()


@pytest.fixture
def toy(toy_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    _known(toy_module, monkeypatch)
    return toy_module


@pytest.fixture(scope="session")
def two_processes(toy_module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several trainings on 2 processes, in one launch, as starting the processes takes longest."""
    root = tmp_path_factory.mktemp("two")
    plain = toy_module.write_data(root / "train.jsonl", LENGTHS)
    nan = toy_module.write_data(root / "nan.jsonl", LENGTHS, {4: "nan"})
    # One at a time the two processes have (9, 2), (7, 4), (5, 11), (0, 3), (6, 10), (8, 1): see the plan of seed 0.
    troubles = {2: "unreadable", 5: "empty", 0: "unreadable", 10: "unreadable", 8: "empty", 1: "empty"}
    empty = toy_module.write_data(root / "empty.jsonl", LENGTHS, troubles)
    long = toy_module.write_data(root / "long.jsonl", LENGTHS * 4)
    odd = toy_module.write_data(root / "odd.jsonl", [*LENGTHS, 3])
    jobs: list[tuple[str, Path, list[str], dict[str, Any]]] = [
        ("plain", plain, ["train.accumulate=2", "task.dropout=0.3"], {}),
        ("clipped", plain, ["optim.clip_norm=0.3", f"data.validation={plain}"], {}),
        ("nan", nan, ["data.batch.examples=1", "checkpoint.every=1"], {}),
        ("empty", empty, ["data.batch.examples=1"], {}),
        ("signal", plain, ["checkpoint.every=99"], {"signal_at": 1, "signal_ranks": [1]}),
        ("signal", plain, ["checkpoint.every=99"], {}),
        ("resumed", long, ["task.dropout=0.3", "task.noise=0.2", "train.accumulate=2"], {}),
        ("odd", odd, ["data.batch.examples=3"], {}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        _known(toy_module, patch)
        # A run on one process, stopped after 2 steps of 4 batches, to be resumed on two with 2 x 2.
        alone = toy_module.make(root / "resumed", long, "task.dropout=0.3", "task.noise=0.2", "train.accumulate=4")
        toy_module.train(alone, [toy_module.At(7, toy_module.terminate)])
    toy_module.launch(
        root,
        [
            {
                "output": str(root / name),
                "train": str(file),
                "overrides": ["train.devices=2", *overrides],
                **extra,
            }
            for name, file, overrides, extra in jobs
        ],
    )
    return root
