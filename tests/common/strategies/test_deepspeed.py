"""DeepSpeed's ZeRO on CPU: the same training as on one process, exact resume, and what is refused.

What is run here is run by two processes over gloo, with DeepSpeed's own CPU accelerator; fp16 needs a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from luthier.common.checkpoint import directory
from luthier.common.errors import CheckpointError
from luthier.common.recipe import Recipe
from luthier.common.strategies import deepspeed
from luthier.common.training import curves

pytest.importorskip("deepspeed")

FILE = Path(__file__).with_name("zero.py").resolve()
STAGES = ["zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload"]
SOME = ["zero1", "zero2", "zero3_offload"]
PRECISIONS = ["32", "bf16-mixed", "bf16-true", "16-mixed"]


def make(strategy: str, optimizer: str = "adamw", **train: Any) -> Recipe:
    tree = {
        "task": {"kind": "test.any"}, "model": {"path": "any"}, "data": {"train": "any.jsonl"}, "output": "any",
        "optim": {"name": optimizer},
        "train": {"strategy": f"deepspeed_{strategy}", "devices": 2, "accelerator": "cpu", **train},
    }  # fmt: skip
    return Recipe.model_validate(tree)


# ------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_takes_the_configuration(stage: str, precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    made = deepspeed.config(make(stage, precision=precision))
    found = DeepSpeedConfig(json.loads(json.dumps(made)))
    zero = found.zero_config
    assert zero.stage == int(stage[4])
    assert (zero.offload_optimizer is not None) == stage.endswith("_offload")
    assert (zero.offload_param is not None) == (stage == "zero3_offload")
    assert not found.managed_gradient_accumulation
    assert found.gradient_accumulation_steps == 1
    assert found.gradient_clipping == 0
    assert found.torch_autocast_enabled == (precision == "bf16-mixed")
    assert found.bfloat16_config.enabled == (precision == "bf16-true")
    assert found.float16_config.enabled == (precision == "16-mixed")


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_is_summed_in_fp32_where_deepspeed_can(stage: str) -> None:
    made = deepspeed.config(make(stage, precision="bf16-true"))
    assert ("data_types" in made) == (stage != "zero1")


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (make("zero2", precision="16-mixed"), "fp16 on a GPU only"),
        (make("zero1", optimizer="adafactor"), "whole matrices"),
        (make("zero3", compile=True), "torch.compile"),
        (make("zero2", tensor_parallel=2), "fsdp2\\+tp"),
        (make("zero2", accelerator="mps"), "CUDA devices and CPU"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(recipe: Recipe, reason: str) -> None:
    assert re.search(reason, deepspeed.refuse(recipe) or "")


@pytest.mark.parametrize("stage", STAGES)
def test_what_works_is_not_refused(stage: str) -> None:
    for precision in ("32", "bf16-mixed", "bf16-true"):
        assert deepspeed.refuse(make(stage, precision=precision)) is None


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "find_spec", lambda _: None)
    assert "luthier[deepspeed]" in (deepspeed.refuse(make("zero2")) or "")


# ------------------------------------------------------------------------------------------------ training


LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5]
STEP = (
    "task.layers=2", "task.frozen=true", "task.noise=0.2", "optim.momentum=0.9", "optim.clip_norm=0.5",
    "optim.schedule=linear",
)  # fmt: skip


def launch(root: Path, name: str, jobs: list[dict[str, Any]]) -> None:
    (root / f"{name}.json").write_text(json.dumps(jobs))
    hidden = ("LUTHIER_OUTPUT", "LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(FILE.parents[3] / "src"), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, str(FILE), str(root / f"{name}.json")],
        capture_output=True,
        text=True,
        timeout=540,
        env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=root,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def write(file: Path, lengths: list[int], troubles: dict[int, str]) -> None:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for index, length in enumerate(lengths):
        x = torch.randn(length, 3, generator=generator)
        y = x.sin().sum(dim=1) + 0.1 * torch.randn(length, generator=generator)
        lines.append(json.dumps({"x": x.tolist(), "y": y.tolist(), "trouble": troubles.get(index)}))
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each training once on one process without a strategy, and by each stage on two."""
    root = tmp_path_factory.mktemp("zero")
    write(root / "plain.jsonl", [*LENGTHS, 3] * 3, {})
    # One at a time the two processes have (9, 2), (7, 4), (5, 11), (0, 3), (6, 10), (8, 1): see the plan of seed 0.
    write(root / "trouble.jsonl", LENGTHS, {4: "nan", 0: "empty", 3: "empty", 10: "unreadable", 8: "empty"})

    def job(name: str, data: str, ranks: int, strategy: str, *overrides: str) -> dict[str, Any]:
        machine = (f"train.devices={ranks}", f"train.strategy={strategy}")
        return {
            "output": str(root / name), "train": str(root / f"{data}.jsonl"), "overrides": [*machine, *overrides]
        }  # fmt: skip

    # 20 batches of 2 examples, 2 x 2 a step; the last one holds two examples
    plain = (*STEP, "checkpoint.every=2", f"data.validation={root / 'plain.jsonl'}", "evaluate.every=3")
    alone = ("task.layers=2", "data.batch.examples=1", "checkpoint.every=1")
    bf16 = (*STEP, "train.precision=bf16-mixed")
    two = []
    for stage in STAGES:
        name = f"deepspeed_{stage}"
        two.append(job(f"{stage}-plain", "plain", 2, name, *plain, "train.accumulate=2"))
        two.append(job(f"{stage}-trouble", "trouble", 2, name, *alone))
    for stage in SOME:
        name = f"deepspeed_{stage}"
        two.append(job(f"{stage}-bf16", "plain", 2, name, *bf16, "train.accumulate=2"))
        two.append(job(f"{stage}-true", "plain", 2, name, *STEP, "train.precision=bf16-true"))
    launch(root, "two", two)
    for stage in STAGES:
        copy_until(root / f"{stage}-plain", root / f"{stage}-again", 4)
    copy_until(root / "zero2-plain", root / "other", 4)
    again = [job(f"{stage}-again", "plain", 2, f"deepspeed_{stage}", *plain, "train.accumulate=2") for stage in STAGES]
    launch(root, "again", again)
    one = [
        job("plain", "plain", 1, "auto", *plain, "train.accumulate=4"),
        job("trouble", "trouble", 1, "auto", *alone, "train.accumulate=2"),
        job("bf16", "plain", 1, "auto", *bf16, "train.accumulate=4"),
        job("true", "plain", 1, "auto", *STEP, "train.precision=bf16-true", "train.accumulate=2"),
        job("other", "plain", 1, "deepspeed_zero2", *plain, "train.accumulate=4"),
    ]
    launch(root, "one", one)
    return root


def copy_until(whole: Path, folder: Path, step: int) -> None:
    """A copy of a run as if it had been killed just after saving this step."""
    shutil.copytree(whole, folder, symlinks=True)
    for checkpoint in directory.committed(folder / "checkpoints"):
        if directory.step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)


def model(folder: Path) -> dict[str, Tensor]:
    return load_file(directory.committed(folder / "checkpoints")[-1] / "model" / "model.safetensors")


def curve(folder: Path, name: str) -> list[float]:
    return [float(row["value"]) for row in curves.read(folder / "curves.csv") if row["name"] == name]


def position(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory.committed(folder / "checkpoints")[-1] / "run.json").read_text())
    position: dict[str, Any] = found["position"]
    return position


def close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> bool:
    assert found.keys() == expected.keys()
    return all(float((found[name].double() - expected[name].double()).abs().max()) <= bound for name in expected)


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_equal_one(root: Path, stage: str) -> None:
    """Losses, norms before clipping, evaluations and weights; the last window is shorter than the others."""
    for name in ("train/loss", "train/gradient_norm", "validation/loss"):
        expected = curve(root / "plain", name)
        assert len(expected) >= 2
        assert curve(root / f"{stage}-plain", name) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert max(curve(root / "plain", "train/gradient_norm")) > 0.5  # so that something was clipped
    assert close(model(root / f"{stage}-plain"), model(root / "plain"), 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_usable_is_left_out_on_all(root: Path, stage: str) -> None:
    """A NaN on one process, a step in which nothing carries loss on either, and one in which one has nothing."""
    assert position(root / "trouble")["skipped"] == position(root / f"{stage}-trouble")["skipped"] == 2
    expected = curve(root / "trouble", "train/loss")
    assert len(expected) == 6
    assert curve(root / f"{stage}-trouble", "train/loss") == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert close(model(root / f"{stage}-trouble"), model(root / "trouble"), 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_goes_on_bit_for_bit(root: Path, stage: str) -> None:
    whole, again = root / f"{stage}-plain", root / f"{stage}-again"
    for name in ("train/loss", "train/gradient_norm", "validation/loss"):
        assert curve(again, name) == curve(whole, name)
    assert close(model(again), model(whole), 0.0)
    kept = [folder / "checkpoints" / directory.name(4) / directory.MANIFEST for folder in (whole, again)]
    assert kept[0].read_bytes() == kept[1].read_bytes()  # it went on from there and did not start over


@pytest.mark.parametrize("stage", SOME)
def test_bf16_mixed_is_that_of_one_process(root: Path, stage: str) -> None:
    """fp32 weights under autocast: two halves of a batch are rounded as the whole is, so only sums differ."""
    expected = curve(root / "bf16", "train/loss")
    assert curve(root / f"{stage}-bf16", "train/loss") == pytest.approx(expected, rel=1e-5)
    assert all(t.dtype == torch.float32 for t in model(root / f"{stage}-bf16").values() if t.is_floating_point())


@pytest.mark.parametrize("stage", SOME)
def test_bf16_true_keeps_fp32_weights_behind(root: Path, stage: str) -> None:
    """It follows the fp32 training within bf16's rounding (2^-8), and saves 16-bit weights."""
    assert curve(root / f"{stage}-true", "train/loss") == pytest.approx(curve(root / "true", "train/loss"), rel=0.05)
    assert all(t.dtype == torch.bfloat16 for t in model(root / f"{stage}-true").values() if t.is_floating_point())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="DeepSpeed computes in fp16 on a GPU only")
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_follows_the_fp32_training(tmp_path: Path, stage: str) -> None:
    """Within fp16's rounding, through its loss scaling: a wrong division would be off by powers of two."""
    write(tmp_path / "plain.jsonl", [*LENGTHS, 3] * 3, {})
    for name, strategy, precision in (("one", "auto", "32"), ("zero", f"deepspeed_{stage}", "16-mixed")):
        overrides = [
            *STEP, f"train.strategy={strategy}", f"train.precision='{precision}'", "train.accelerator=gpu",
            "train.devices=1", "train.accumulate=4",
        ]  # fmt: skip
        train = str(tmp_path / "plain.jsonl")
        launch(tmp_path, name, [{"output": str(tmp_path / name), "train": train, "overrides": overrides}])
    for name in ("train/loss", "train/gradient_norm"):
        assert curve(tmp_path / "zero", name) == pytest.approx(curve(tmp_path / "one", name), rel=0.02)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_what_was_trained_and_no_code(root: Path, stage: str) -> None:
    folder = directory.committed(root / f"{stage}-plain" / "checkpoints")[-1] / "state" / "trainer.pt"
    described = json.loads((folder / deepspeed.DESCRIPTION).read_text())
    trained = set(described["trained"])
    assert trained == {f"model.{layer}.{kind}" for layer in ("first", "layers.0", "layers.1", "last")
                       for kind in ("weight", "bias")}  # fmt: skip
    assert not list(folder.rglob("*.py"))
    files = sorted((folder / deepspeed.TAG).iterdir())
    assert len(files) == (4 if "zero3" in stage else 3)  # weights of each rank, or of all; optimizer of each
    for file in files:
        held = deepspeed._load(str(file), map_location="cpu")
        names = {name for name in held.get("module", {}) if name.endswith(("weight", "bias"))}
        assert names <= trained


def test_deepspeeds_files_make_no_other_objects(tmp_path: Path) -> None:
    torch.save({"state": Path("any")}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="more than tensors"):
        deepspeed._load(str(tmp_path / "file.pt"))


def test_another_number_of_processes_is_refused(root: Path) -> None:
    found = json.loads((root / "other.rank0.json").read_text())["error"]
    assert "CheckpointError" in found
    assert "zero2 on 1 processes" in found
    assert "zero2 on 2 processes" in found


@pytest.mark.parametrize(("described", "problem"), [
    ({"stage": 1, "ranks": 2, "trained": []}, "same stage"),
    ({"stage": 2, "ranks": 4, "trained": []}, "same stage"),
    (None, "was not saved by DeepSpeed"),
])  # fmt: skip
def test_another_state_is_refused_before_it_is_read(tmp_path: Path, described: Any, problem: str) -> None:
    if described is not None:
        (tmp_path / deepspeed.DESCRIPTION).write_text(json.dumps(described))
    here: Any = SimpleNamespace(stage=2, world_size=2)
    with pytest.raises(CheckpointError, match=problem):
        deepspeed.ZeRO._comparable(here, tmp_path)
