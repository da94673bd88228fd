"""NeMo's models from a recipe to a finished run: what the folder holds, and that NeMo alone reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common.checkpoint import directory
from luthier.common.evaluation.saved import evaluate_checkpoint, evaluate_recipe
from luthier.common.training import curves
from luthier.common.training.run import train

pytest.importorskip("nemo")

ALONE = """
import json, logging, sys
from nemo.utils import logging as nemo_logging
nemo_logging.setLevel(logging.ERROR)
from nemo.collections.asr.models import ASRModel
model = ASRModel.restore_from(sys.argv[1], map_location="cpu").eval()
texts = [one.text for one in model.transcribe(sys.argv[2:], batch_size=4, verbose=False)]
assert not any(name.split(".")[0] == "luthier" for name in sys.modules)
print(json.dumps(texts))
"""


def values(folder: Path, name: str) -> list[str]:
    return [row["value"] for row in curves.read(folder / "curves.csv") if row["name"] == name]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    with tarfile.open(checkpoint / "model" / "model.nemo") as tar:
        return torch.load(tar.extractfile("./model_weights.ckpt"), weights_only=True)


@pytest.fixture(scope="module")
def learned(make_recipe, config_of, manifest, tmp_path_factory):
    """(folder, outcome) of a CTC model that has learned the 12 recordings by heart, from random weights."""
    folder = tmp_path_factory.mktemp("runs") / "ctc"
    recipe = make_recipe(
        config_of("ctc", [], dropout=0.0, dropout_att=0.0, dropout_pre_encoder=0.0),
        model={"vocabulary": "data"},
        data={"validation": str(manifest), "batch": {"examples": 4}},
        optim={"learning_rate": 1e-2, "warmup": 10, "schedule": "cosine"},
        train={"steps": 150, "log_every": 1},
        evaluate={"every": 150, "slices": ["speaker", "duration"]},
        checkpoint={"best": "cer"},
        output=str(folder),
    )
    return folder, train(recipe)


def test_it_learns(learned):
    folder, outcome = learned
    losses = [float(value) for value in values(folder, "train/loss")]
    assert len(losses) == 150
    assert losses[-1] < 0.1 * losses[0]
    assert outcome.metrics["cer"] <= 0.1
    assert outcome.metrics["slices"]["speaker"].keys() == {"a", "b"}


def test_nemo_alone_restores_it_and_writes_the_same(learned, manifest):
    """In a process that knows nothing of this package."""
    folder, _ = learned
    best = folder / "checkpoints" / "best"
    files = [str(manifest.parent / f"{number}.wav") for number in range(12)]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(best / "model" / "model.nemo"), *files],
        capture_output=True, text=True, check=False, timeout=300, cwd=manifest.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    texts = json.loads(done.stdout.strip().splitlines()[-1])
    (sample_file,) = (folder / "samples").glob("step-*150.json")
    samples = json.loads(sample_file.read_text(encoding="utf-8"))
    assert len(samples) == 8
    assert [one["hypothesis"] for one in samples] == texts[: len(samples)] or {
        one["reference"]: one["hypothesis"] for one in samples
    }.items() <= {
        json.loads(line)["text"]: text
        for line, text in zip(manifest.read_text(encoding="utf-8").splitlines(), texts, strict=True)
    }.items()


def test_the_checkpoint_alone_gives_the_same_numbers(learned):
    folder, outcome = learned
    again = evaluate_checkpoint(folder / "checkpoints" / "best")
    for name in ("wer", "wer_raw", "cer", "cer_raw"):
        assert again.metrics[name] == outcome.metrics[name]
    assert again.metrics["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-5)


def test_the_archive_holds_no_paths_of_this_machine(learned):
    folder, _ = learned
    with tarfile.open(folder / "checkpoints" / "best" / "model" / "model.nemo") as tar:
        assert {member.name for member in tar} == {"./model_config.yaml", "./model_weights.ckpt"}
        text = tar.extractfile("./model_config.yaml").read().decode()
    assert str(folder) not in text
    assert "target: nemo.collections.asr.models.ctc_models.EncDecCTCModel" in text


RUNS: dict[str, dict[str, Any]] = {
    "ctc": {"kind": "ctc"},
    "hybrid": {"kind": "hybrid", "model": {"joint_batch": 2}, "train": {"gradient_checkpointing": True}},
    "masked": {
        "kind": "ctc",
        "subwords": True,
        "data": {"augment": {"speed": [0.9, 1.0, 1.1], "time_masks": 2, "frequency_masks": 1}},
        "model": {
            "spec_augment": True,
            "config": {"spec_augment": {"_target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
                                        "freq_masks": 2, "time_masks": 2, "freq_width": 5, "time_width": 0.05}},
        },
    },
    "lora": {"kind": "ctc", "model": {"lora": {"rank": 2, "dropout": 0.3}}},
    "streamed": {"kind": "streamed"},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_resumed_runs_are_bit_for_bit_the_same(name, make_recipe, saved_of, manifest, tmp_path, monkeypatch):
    """From the first and a middle checkpoint: losses, what is saved, and optimizer state. Dropout, dither, masks, batch
    statistics and drawn contexts are all on."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    sections = dict(RUNS[name])
    path = saved_of(sections.pop("kind"), sections.pop("subwords", False))
    more = {section: sections.get(section, {}) for section in ("data", "model", "train")}

    def recipe(folder: Path) -> Any:
        return make_recipe(
            path,
            model=more["model"],
            data={"validation": str(manifest), "batch": {"examples": 3}, **more["data"]},
            optim={"learning_rate": 1e-3, "warmup": 0},
            train={"steps": 4, "accumulate": 2, "log_every": 1, **more["train"]},
            evaluate={"every": 2},
            checkpoint={"every": 1, "keep_last": 10, "best": "loss"},
            output=str(folder),
        )

    whole = tmp_path / "whole"
    train(recipe(whole))
    finished = directory.committed(whole / "checkpoints")
    assert [directory.step_of(one) for one in finished] == [1, 2, 3, 4]
    for stop in (1, 2):
        folder = tmp_path / f"from-{stop}"
        shutil.copytree(whole, folder, symlinks=True)
        for checkpoint in directory.committed(folder / "checkpoints"):
            if directory.step_of(checkpoint) > stop:
                shutil.rmtree(checkpoint)
        train(recipe(folder))
        for curve in ("train/loss", "train/gradient_norm", "validation/loss", "validation/cer"):
            assert values(folder, curve) == values(whole, curve), curve
            assert values(whole, curve)
        last = directory.committed(folder / "checkpoints")[-1]
        for part in ("model", "state"):
            for file in (finished[-1] / part).iterdir():
                if file.suffix in (".nemo", ".safetensors"):  # a `.nemo` of the same model has the same bytes
                    assert file.read_bytes() == (last / part / file.name).read_bytes(), file.name


RUN = """
import json, os, sys
os.fsync = lambda _: None
from luthier.common import reading
from luthier.common.training.run import train
train(reading.build(json.loads(open(sys.argv[1]).read()), "test.yaml"))
"""


@pytest.mark.parametrize("kind", ["hybrid"])
def test_two_processes_equal_one_with_the_whole_batch(kind, make_recipe, config_of, manifest, tmp_path):
    """faults/asr.md, 18. Without batch norms, whose statistics are of a device's own batch."""
    still = {"dropout": 0.0, "dropout_att": 0.0, "dropout_pre_encoder": 0.0, "conv_norm_type": "layer_norm"}
    path = config_of(kind, **still)

    def recipe(folder: Path, examples: int, **settings: Any) -> Any:
        return make_recipe(
            path,
            model={"config": {"preprocessor.dither": 0.0}},
            data={"validation": str(manifest), "batch": {"examples": examples, "bucket_batches": 0}},
            optim={"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.01, "warmup": 0},
            train={"steps": 3, "log_every": 1, **settings},
            checkpoint={"best": "loss"},
            output=str(folder),
        )

    two = recipe(tmp_path / "two", 3, devices=2, strategy="ddp")
    (tmp_path / "recipe.json").write_text(json.dumps(two.model_dump(mode="json")))
    (tmp_path / "run.py").write_text(RUN)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "recipe.json")],
        capture_output=True, text=True, check=False, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    train(recipe(tmp_path / "one", 6))
    for curve in ("train/loss", "train/gradient_norm", "validation/loss"):
        expected = [float(value) for value in values(tmp_path / "one", curve)]
        assert expected
        assert [float(value) for value in values(tmp_path / "two", curve)] == pytest.approx(expected, rel=1e-5), curve
    one, other = (weights(directory.committed(tmp_path / name / "checkpoints")[-1]) for name in ("one", "two"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert float((other[name] - value).abs().max()) <= 2e-6, name


@pytest.mark.parametrize(("precision", "kind"), [("bf16-mixed", "ctc"), ("bf16-true", "hybrid")])
def test_bfloat16(make_recipe, saved_of, manifest, tmp_path, precision, kind):
    """Some CPUs have no mixed LSTM, which transducers have."""
    recipe = make_recipe(
        saved_of(kind),
        data={"validation": str(manifest)},
        train={"steps": 2, "precision": precision},
        output=str(tmp_path / "out"),
    )
    metrics = train(recipe).metrics
    again = evaluate_checkpoint(tmp_path / "out" / "checkpoints" / "best")
    assert again.metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert again.metrics["wer"] == metrics["wer"]


def test_an_adapter_is_saved_alone_and_merges_into_a_nemo_file(make_recipe, saved_of, manifest, tmp_path):
    """PEFT puts it onto the base; merged, NeMo saves it and writes what the run wrote (NM#14848)."""
    from nemo.collections.asr.models import ASRModel
    from peft import PeftModel

    base = saved_of("ctc")
    recipe = make_recipe(
        base,
        model={"lora": {"rank": 4, "target_modules": ["linear_q", "linear_v", "linear1"]}},
        data={"validation": str(manifest)},
        optim={"learning_rate": 3e-2},
        train={"steps": 3},
        output=str(tmp_path / "out"),
    )
    outcome = train(recipe)
    model = tmp_path / "out" / "checkpoints" / "best" / "model"
    assert not list(model.glob("*.nemo"))
    assert sum(file.stat().st_size for file in model.iterdir()) < Path(base).stat().st_size / 2
    again = evaluate_checkpoint(model.parent)
    assert again.metrics["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-5)
    merged = PeftModel.from_pretrained(ASRModel.restore_from(base, map_location="cpu"), str(model)).merge_and_unload()
    merged.save_to(str(tmp_path / "merged.nemo"))
    whole = make_recipe(str(tmp_path / "merged.nemo"), data={"validation": str(manifest)})
    found = evaluate_recipe(whole, "validation").metrics
    assert found["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-4)
    assert found["cer"] == outcome.metrics["cer"]
