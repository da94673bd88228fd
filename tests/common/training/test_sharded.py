"""FSDP2 on processes that share the model: the same training as on one, and a checkpoint for any number of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from luthier.common.checkpoint import directory, shards
from luthier.common.errors import CheckpointError
from luthier.common.training.run import train

LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5]
MODEL = ("task.layers=2", "task.dropout=0.3", "task.noise=0.2", "optim.name=adamw", "optim.weight_decay=0.1")
STEP = (*MODEL, "optim.clip_norm=0.5")


def job(root: Path, name: str, data: str, ranks: int, *overrides: str, **extra: Any) -> dict[str, Any]:
    devices = (f"train.devices={ranks}", "train.strategy=fsdp2")
    return {
        "output": str(root / name), "train": str(root / f"{data}.jsonl"), "overrides": [*devices, *overrides], **extra
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(toy_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded")
    toy_module.write_data(root / "plain.jsonl", LENGTHS * 4)
    toy_module.write_data(root / "nan.jsonl", LENGTHS, {4: "nan"})
    troubles = {2: "unreadable", 5: "empty", 0: "unreadable", 10: "unreadable", 8: "empty", 1: "empty"}
    toy_module.write_data(root / "empty.jsonl", LENGTHS, troubles)
    evaluated = (f"data.validation={root / 'plain.jsonl'}", "evaluate.every=3")
    alone = ("data.batch.examples=1",)
    toy_module.launch(
        root,
        [
            job(root, "whole", "plain", 2, *STEP, *evaluated, "train.accumulate=2"),
            job(root, "nan", "nan", 2, *alone, *MODEL, "checkpoint.every=1"),
            job(root, "empty", "empty", 2, *alone, "checkpoint.every=1"),
            job(root, "signal", "plain", 2, *STEP, signal_at=1, signal_ranks=[1]),
            job(root, "lora", "plain", 2, *STEP, "task.frozen=true"),
        ],
    )
    for name in ("again", "one", "four"):
        copy_until(root / "whole", root / name, 3)
    toy_module.launch(root, [job(root, "again", "plain", 2, *STEP, *evaluated, "train.accumulate=2")])
    toy_module.launch(root, [job(root, "one", "plain", 1, *STEP, *evaluated, "train.accumulate=4")])
    toy_module.launch(root, [job(root, "four", "plain", 4, *STEP, *evaluated, "train.accumulate=1")])
    return root


def copy_until(whole: Path, folder: Path, step: int) -> None:
    """A copy of a run as if it had been killed just after saving this step."""
    shutil.copytree(whole, folder, symlinks=True)
    for checkpoint in directory.committed(folder / "checkpoints"):
        if directory.step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)


def model(folder: Path) -> dict[str, Tensor]:
    return load_file(directory.committed(folder / "checkpoints")[-1] / "model" / "model.safetensors")


def close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-6) -> bool:
    assert found.keys() == expected.keys()
    return all(float((found[name] - expected[name]).abs().max()) <= bound for name in expected)


def curve(toy: Any, folder: Path, name: str) -> list[float]:
    return [float(value) for _, value in toy.curve(folder, name)]


@pytest.fixture
def alone(toy: Any, root: Path, tmp_path: Path) -> Callable[..., Path]:
    """The same training on one process without a strategy."""

    def run(name: str, data: str, *overrides: str) -> Path:
        train(toy.make(tmp_path / name, root / f"{data}.jsonl", *overrides))
        return tmp_path / name

    return run


def test_two_processes_equal_one(toy: Any, root: Path, alone: Callable[..., Path]) -> None:
    evaluated = (f"data.validation={root / 'plain.jsonl'}", "evaluate.every=3")
    single = alone("single", "plain", *STEP, *evaluated, "train.accumulate=4")
    for name in ("train/loss", "train/gradient_norm", "validation/loss", "validation/points"):
        expected = curve(toy, single, name)
        assert len(expected) >= 2
        assert curve(toy, root / "whole", name) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert close(model(root / "whole"), model(single))


def test_what_others_load_is_whole_and_plain(toy: Any, root: Path) -> None:
    whole = toy.Net(toy.ToyTask(kind=toy.KIND, layers=2))
    whole.load_state_dict(model(root / "whole"))


def test_the_same_number_of_processes_goes_on_bit_for_bit(toy: Any, root: Path) -> None:
    assert toy.curve(root / "again") == toy.curve(root / "whole")
    assert toy.curve(root / "again", "validation/loss") == toy.curve(root / "whole", "validation/loss")
    assert close(model(root / "again"), model(root / "whole"), 0.0)


@pytest.mark.parametrize("name", ["one", "four"])
def test_another_number_of_processes_goes_on_with_the_same_batches(toy: Any, root: Path, name: str) -> None:
    assert curve(toy, root / name, "train/loss") == pytest.approx(curve(toy, root / "whole", "train/loss"), rel=1e-6)
    assert close(model(root / name), model(root / "whole"))


def test_a_nan_on_one_process_is_left_out_on_both(root: Path, toy: Any) -> None:
    assert toy.position(root / "nan")["skipped"] == 1
    assert all(tensor.isfinite().all() for tensor in model(root / "nan").values())


def test_a_process_with_nothing_to_learn_from_runs_the_model_with_the_other(
    toy: Any, root: Path, alone: Callable[..., Path]
) -> None:
    single = alone("single", "empty", "data.batch.examples=1", "train.accumulate=2")
    assert curve(toy, root / "empty", "train/loss") == pytest.approx(curve(toy, single, "train/loss"), rel=1e-6)
    assert close(model(root / "empty"), model(single))


def test_a_signal_to_one_process_stops_both(root: Path, toy: Any) -> None:
    stopped = [json.loads((root / f"signal.rank{rank}.json").read_text())["stopped_by"] for rank in (0, 1)]
    assert stopped == [15, 15]
    assert toy.position(root / "signal")["step"] == 2


def test_only_what_is_trained_is_in_the_shards(root: Path) -> None:
    folder = directory.committed(root / "lora" / "checkpoints")[-1] / "state"
    described = torch.load(folder / "trainer.pt", weights_only=True)["sharded"]
    assert described["model"] == sorted(
        f"model.{layer}.{part}" for layer in ("first", "last", "layers.0", "layers.1") for part in ("bias", "weight")
    )
    index = shards._Reader(folder / "shards").read_metadata().state_dict_metadata
    assert {key.removeprefix("model.") for key in index if key.startswith("model.")} == set(described["model"])


def test_the_index_of_the_shards_runs_no_code(root: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "owned",)

    import pickle

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="more than descriptions of tensors"):
        shards._Reader(tmp_path).read_metadata()
    assert not (tmp_path / "owned").exists()
