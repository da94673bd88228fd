"""A task small enough to compute by hand, with everything a real one has: padding, unequal counts of what carries loss,
dropout, augmentation, frozen parts, norms, and examples that go wrong in every way.

Run as a script it trains the jobs of a JSON file, one after the other, for tests with several processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from luthier.common import kinds, reading, task
from luthier.common.checkpoint import directory
from luthier.common.data.processing import Batch, Processing, Shown
from luthier.common.data.sources import rows
from luthier.common.errors import BadExample, LuthierError
from luthier.common.recipe import Recipe, Source, TaskSection
from luthier.common.task import LossSum, Predicted
from luthier.common.training import curves
from luthier.common.training.run import Outcome, train

KIND, MODULE = "test.toy", "luthier_toy"
FEATURES = 3
FILE = Path(__file__).resolve()


class ToyTask(TaskSection):
    dropout: float = 0.0
    """Dropout between the two layers."""
    noise: float = 0.0
    """Standard deviation of the noise on training inputs."""
    frozen: bool = False
    """A frozen trunk with a norm and dropout in front."""
    norm: bool = False
    """A trained batch norm, whose running statistics change in training."""
    layers: int = 0
    """Further hidden layers, as a list of repeated modules."""


class Config(Recipe):
    task: ToyTask


class ToyProcessing(Processing[dict[str, Any]]):
    unit = "points"

    def __init__(self, noise: float):
        self.noise = noise

    def read(self, source: Source) -> Iterator[Any]:
        for row in rows(source.path, source=source.label):
            yield row if isinstance(row, BadExample) else {**row.fields, "where": row.where}

    def examine(self, example: dict[str, Any], training: bool) -> list[dict[str, Any]]:
        if example.get("trouble") == "bad":
            raise BadExample("marked", "is marked as bad", where=example["where"])
        return [example]

    def cost(self, example: dict[str, Any]) -> float:
        return len(example["y"])

    def encode(self, example: dict[str, Any], generator: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        if example.get("trouble") == "unreadable":
            raise BadExample("unreadable", "can't be read any more", where=example["where"])
        x = torch.tensor(example["x"], dtype=torch.float32)
        y = torch.tensor(example["y"], dtype=torch.float32)
        if example.get("trouble") == "nan":
            y = y * float("nan")
        if example.get("trouble") == "huge":
            y = y * 1000
        if generator is not None and self.noise:
            x = x + self.noise * torch.tensor(generator.standard_normal(x.shape), dtype=torch.float32)
        mask = torch.ones(len(y)) * (example.get("trouble") != "empty")
        return x, torch.stack([y, mask], dim=1)

    def collate(self, encoded: Sequence[Any], generator: np.random.Generator | None) -> dict[str, Tensor]:
        """x [B, T, 3], y [B, T], mask [B, T] (1: carries loss, 0: padding)."""
        x = nn.utils.rnn.pad_sequence([item[0] for item in encoded], batch_first=True)
        rest = nn.utils.rnn.pad_sequence([item[1] for item in encoded], batch_first=True)
        return {"x": x, "y": rest[..., 0], "mask": rest[..., 1]}

    def show(self, data: Any, row: int) -> Shown:
        return Shown(f"row {row}", {}, [])


class Net(nn.Module):
    def __init__(self, section: ToyTask):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.Dropout(0.5))
        self.trunk.requires_grad_(False)
        if not section.frozen:
            self.trunk = nn.Sequential()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if section.norm else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(section.layers))
        self.dropout = nn.Dropout(section.dropout)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3] -> [N]"""
        hidden = torch.tanh(self.norm(self.first(self.trunk(x))))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.last(self.dropout(hidden))[:, 0]


def squared_error(net: nn.Module, data: dict[str, Tensor]) -> tuple[Tensor, float]:
    """(summed squared error of all points, their number)"""
    asked = data["mask"] > 0
    return (net(data["x"][asked]) - data["y"][asked]).square().sum(), float(asked.sum())


class Task(task.Task):
    metrics: ClassVar[dict[str, str]] = {"loss": "min", "points": "max"}
    log_names = ("twice",)
    recipe: Config

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe)
        self.model = Net(recipe.task)
        if weights is not None:
            self.model.load_state_dict(load_file(weights / "model.safetensors"))

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> ToyProcessing:
        return ToyProcessing(recipe.task.noise)

    def loss(self, data: dict[str, Tensor]) -> LossSum:
        total, count = squared_error(self.model, data)
        return LossSum(total, count, {"twice": 2 * count} if count else {})

    def predict(self, batch: Batch) -> Predicted:
        total, count = squared_error(self.model, batch.data)
        return Predicted([int(row.sum()) for row in batch.data["mask"]], LossSum(total, count))

    def score(self, records: Sequence[int]) -> dict[str, Any]:
        return {"points": sum(records), "examples": len(records)}

    def samples(self, records: Sequence[int], number: int) -> list[dict[str, Any]]:
        return [{"points": record} for record in records[:number]]

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        save_file(self.model.state_dict(), directory / "model.safetensors")


def modules() -> dict[str, ModuleType]:
    """What `kinds` imports for the kind of this file."""
    here = sys.modules[__name__]
    return {f"{MODULE}.config": here, f"{MODULE}.task": here}


# ------------------------------------------------------------------------------------------------ data and recipes


def write_data(file: Path, lengths: Sequence[int], troubles: dict[int, str] | None = None, seed: int = 0) -> Path:
    """Examples with these numbers of points: y = a fixed function of x, and noise."""
    generator = np.random.default_rng(seed)
    lines = []
    for index, length in enumerate(lengths):
        x = generator.standard_normal((length, FEATURES))
        y = np.sin(x).sum(axis=1) + 0.1 * generator.standard_normal(length)
        lines.append(json.dumps({"x": x.tolist(), "y": y.tolist(), "trouble": (troubles or {}).get(index)}))
    file.write_text("\n".join(lines) + "\n")
    return file


def tree(folder: Path, train_file: Path) -> dict[str, Any]:
    return {
        "task": {"kind": KIND},
        "model": {"path": "toy"},
        "data": {"train": str(train_file), "batch": {"examples": 2, "bucket_batches": 0}, "workers": 0},
        "optim": {
            "name": "sgd", "learning_rate": 0.05, "momentum": 0, "weight_decay": 0, "schedule": "constant", "warmup": 0,
            "clip_norm": None,
        },
        "train": {"epochs": 1, "accelerator": "cpu", "devices": 1, "log_every": 1, "threads": 1},
        "checkpoint": {"every": 3, "keep_last": 99},
        "output": str(folder),
    }  # fmt: skip


def make(folder: Path, train_file: Path, *overrides: str) -> Config:
    return reading.build(reading.override(tree(folder, train_file), overrides), "toy.yaml")  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------ what a run left


def checkpoints(folder: Path) -> list[Path]:
    return directory.committed(folder / "checkpoints")


def state(folder: Path) -> dict[str, Any]:
    """Lightning's checkpoint in the newest checkpoint of a run."""
    found: dict[str, Any] = torch.load(checkpoints(folder)[-1] / "state" / "trainer.pt", weights_only=True)
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = state(folder)["state_dict"]
    return found


def position(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoints(folder)[-1] / "run.json").read_text())["position"]
    return found


def curve(folder: Path, name: str = "train/loss") -> list[tuple[int, str]]:
    """(step, value as written) of one curve."""
    return [(int(row["step"]), row["value"]) for row in curves.read(folder / "curves.csv") if row["name"] == name]


# ------------------------------------------------------------------------------------------------ interference


class At(Callback):
    """Does something before the batch with this index within a sitting."""

    def __init__(self, batch: int, action: Any):
        self.batch, self.action = batch, action

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.action()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# ------------------------------------------------------------------------------------------------ as a script


def launch(root: Path, jobs: list[dict[str, Any]]) -> None:
    """Train jobs one after the other in a process of its own, which starts those that `train.devices` asks for."""
    (root / "jobs.json").write_text(json.dumps(jobs))
    kept = {name: value for name, value in os.environ.items() if name not in ("LUTHIER_OUTPUT", "LOCAL_RANK", "RANK")}
    path = os.pathsep.join([str(FILE.parents[3] / "src"), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(FILE), str(root / "jobs.json")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=root,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def _run(job: dict[str, Any], rank: int) -> None:
    made = make(Path(job["output"]), Path(job["train"]), *job.get("overrides", ()))
    callbacks = [At(job["signal_at"], terminate)] if "signal_at" in job and rank in job["signal_ranks"] else []
    try:
        outcome: Outcome = train(made, callbacks)
        found = {"stopped_by": outcome.stopped_by, "folder": str(outcome.folder)}
    except LuthierError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(f"{job['output']}.rank{rank}.json").write_text(json.dumps(found))


def main() -> None:
    sys.modules.update(modules())
    kinds.modules()[KIND] = MODULE
    for job in json.loads(Path(sys.argv[1]).read_text()):
        _run(job, int(os.environ.get("LOCAL_RANK", "0")))


if __name__ == "__main__":
    main()
