"""What the fault tests share: tasks in processes of their own, a disk that can be filled, and the table of figures.

`make faults` runs the large form: `FAULT_KILLS` is then the number of kills over all tasks together, and the figures
are also written to build/faults.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from luthier.common import kinds
from luthier.common.reading import build, override
from luthier.common.recipe import Recipe
from luthier.common.verify.rounds import Reference, Rounds

TESTS = Path(__file__).resolve().parents[1]
KILLS = int(os.environ.get("FAULT_KILLS", "0"))
TASKS = ("toy", "whisper", "whisper lora", "sft", "toy ddp") if KILLS else ("toy", "whisper")
STEPS = {"toy": 18, "whisper": 12, "sft": 12}
EVERY = 3

KIND = "test.toy"
SHIM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("luthier_toy_outside", {file!r})
toy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)
"""
FORGETFUL = """
from luthier_toy import toy
class Task(toy.Task):
    done = 0
    def loss(self, data):
        self.done += 1
        loss = super().loss(data)
        return type(loss)(loss.sum * (1 + self.done / 1000), loss.count, loss.logs)
"""
"""A task that doesn't resume exactly: it counts its batches and doesn't save the count."""
FILES = {
    "luthier_toy/__init__.py": SHIM.format(file=str(TESTS / "common" / "training" / "toy.py")),
    "luthier_toy/config.py": "from luthier_toy import toy\nConfig = toy.Config\n",
    "luthier_toy/task.py": "from luthier_toy import toy\nTask = toy.Task\n",
    "luthier_forgetful/__init__.py": "",
    "luthier_forgetful/config.py": "from luthier_toy import toy\nConfig = toy.Config\n",
    "luthier_forgetful/task.py": FORGETFUL,
    "luthier_toy-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: luthier-toy\nVersion: 1\n",
    "luthier_toy-1.dist-info/entry_points.txt": (
        f"[luthier.tasks]\n{KIND} = luthier_toy\ntest.forgetful = luthier_forgetful\n"
    ),
}
"""The toy task as a package from outside, which any process knows that finds it on PYTHONPATH."""

FIGURES: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture(scope="session")
def kills() -> int:
    """Kills over all tasks together in the large form; 0: the small form."""
    return KILLS


@pytest.fixture(scope="session")
def figures() -> dict[str, list[dict[str, Any]]]:
    """Rows of the tables that are printed at the end, by the name of the table."""
    return FIGURES


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name, rows in FIGURES.items():
        terminalreporter.section(name)
        heads = list(rows[0])
        for row in (heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)):
            terminalreporter.write_line(f"| {' | '.join(row)} |")
    if FIGURES and KILLS:
        file = TESTS.parent / "build" / "faults.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(FIGURES, indent=1) + "\n", encoding="utf-8")
        terminalreporter.write_line(f"written to {file.relative_to(TESTS.parent)}")


# ------------------------------------------------------------------------------------------------ tasks


def load(file: Path, name: str) -> ModuleType:
    """A file of other tests as a module."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the package from outside."""
    root = tmp_path_factory.mktemp("outside")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def known(outside: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the toy known, here and in the processes that are started from here."""
    path = [str(outside), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)
    monkeypatch.syspath_prepend(str(outside))
    kinds.modules.cache_clear()
    yield
    kinds.modules.cache_clear()


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """`make(task, *overrides)`: a short recipe of a task, with everything in it that could differ after a resume."""
    root = tmp_path_factory.mktemp("tasks")

    def made(name: str, *overrides: str) -> Recipe:
        parts = {"toy": _toy, "sft": _sft}
        tree = parts[name.split()[0]](root) if name.split()[0] in parts else _whisper(root, "lora" in name)
        devices = 2 if "ddp" in name else 1
        tree["train"] = {
            "steps": STEPS[name.split()[0]],
            "accelerator": "cpu",
            "devices": devices,
            "log_every": 1,
            "threads": 1,
        }
        tree["checkpoint"] = {"every": EVERY, "keep_last": 2}
        tree["evaluate"] = {"every": 6, "limit": 4, "samples": 0, **tree.get("evaluate", {})}
        tree["output"] = str(root / "unused")
        return build(override(tree, overrides), name)

    return made


def _toy(root: Path) -> dict[str, Any]:
    file = root / "toy.jsonl"
    if not file.exists():
        importlib.import_module("luthier_toy").toy.write_data(file, [1 + (5 * i) % 7 for i in range(24)])
    return {
        "task": {"kind": KIND, "dropout": 0.4, "noise": 0.3, "norm": True},
        "model": {"path": "toy"},
        "data": {
            "train": str(file), "validation": str(file), "workers": 0, "batch": {"examples": 2, "bucket_batches": 2}
        },
        "optim": {"name": "adamw", "learning_rate": 0.05, "schedule": "cosine", "warmup": 3},
    }  # fmt: skip


def _whisper(root: Path, lora: bool) -> dict[str, Any]:
    parts = load(TESTS / "modalities" / "asr" / "whisper" / "conftest.py", "luthier_whisper_parts")
    model, rows = root / "whisper", root / "rows.jsonl"
    if not rows.exists():
        parts.save_whisper(model, parts.make_tokenizer(("en", "zh", "it")), True, ("en", "zh", "it"))
        shared = load(TESTS / "modalities" / "asr" / "conftest.py", "luthier_asr_parts")
        waves = [shared.make_tone(number, 0.6 + 0.1 * number) for number in range(len(parts.TEXTS))]
        shared.make_manifest(root, waves, [{"text": text, "language": language} for text, language in parts.TEXTS])
    return {
        "task": {"kind": "asr.whisper"},
        "model": {"path": str(model), "lora": {"rank": 4, "dropout": 0.2} if lora else None},
        "data": {
            "train": str(rows), "validation": str(rows), "workers": 0, "batch": {"examples": 3},
            "augment": {"speed": [0.9, 1.0, 1.1]},
        },
        "optim": {"learning_rate": 1e-3, "schedule": "cosine", "warmup": 3},
        "evaluate": {"max_new_tokens": 4},
    }  # fmt: skip


def _sft(root: Path) -> dict[str, Any]:
    """Packed, and read as a stream in windows of 7 of its 20 conversations."""
    parts = load(TESTS / "modalities" / "llm" / "conftest.py", "luthier_llm_parts")
    model, rows = root / "llama", root / "conversations.jsonl"
    if not rows.exists():
        parts.save_model(model, "llama-dropout")
        parts.write_rows(rows, [parts.dialogue(number, 1 + number % 3) for number in range(20)])
    return {
        "task": {"kind": "llm.sft", "neftune_alpha": 5},
        "model": {"path": str(model)},
        "data": {
            "train": str(rows), "validation": str(rows), "workers": 0, "streaming": True, "buffer": 7,
            "max_length": 150, "batch": {"tokens": 150, "packing": True},
        },
        "optim": {"learning_rate": 1e-2, "schedule": "cosine", "warmup": 3},
    }  # fmt: skip


@dataclass
class Trial:
    """A task whose uninterrupted run has been made."""

    name: str
    rounds: Rounds
    reference: Reference


@pytest.fixture(scope="session")
def trial(make: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    """`trial(task)`: its uninterrupted run, made once."""
    done: dict[str, Trial] = {}

    def made(name: str) -> Trial:
        if name not in done:
            rounds = Rounds(make(name), tmp_path_factory.mktemp(name.replace(" ", "-")), forked="ddp" not in name)
            done[name] = Trial(name, rounds, rounds.alone())
        return done[name]

    return made


# ------------------------------------------------------------------------------------------------ disks


class Disk:
    """A small file system in memory, which can be filled and made read-only."""

    def __init__(self, path: Path, size: int):
        self.path, self._ballast = path, path / "ballast"
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def _mount(self, *arguments: str) -> None:
        done = subprocess.run(["mount", *arguments, str(self.path)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def fill(self, leave: int) -> None:
        """Take all space but so many bytes."""
        more = shutil.disk_usage(self.path).free - leave
        if more > 0:
            with self._ballast.open("ab") as stream:
                os.posix_fallocate(stream.fileno(), stream.tell(), more)

    def free(self) -> None:
        """Give the space back."""
        self._ballast.unlink(missing_ok=True)

    def read_only(self, on: bool) -> None:
        self._mount("-o", f"remount,{'ro' if on else 'rw'}")

    def remove(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Disk]]:
    """`disk(size)`: a new small disk of so many bytes."""
    made: list[Disk] = []

    def make_one(size: int) -> Disk:
        made.append(Disk(tmp_path / f"disk-{len(made)}", size))
        return made[-1]

    yield make_one
    for each in made:
        if each.path.is_mount():
            each.remove()


def pytest_generate_tests(metafunc: Any) -> None:
    """`task`: every task there is."""
    if "task" in metafunc.fixturenames:
        metafunc.parametrize("task", TASKS)
