"""The recipes that ship, at toy size: trained, stopped, resumed, evaluated."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from luthier.common import reading
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training import curves
from luthier.common.training.run import train

RECIPES = {
    "sd15-lora": "sd", "sdxl-lora": "sdxl", "sd3-lora": "sd3", "flux-lora": "flux", "dreambooth": "sd",
    "textual-inversion": "sd", "shapes-base": "sd", "shapes": "sd",
}  # fmt: skip


def small(name: str, pipeline: str, folder: Path, place: Path, output: str) -> Any:
    more = []
    if name == "dreambooth":
        more = [f"data.prior.path={place / 'class'}", "data.prior.number=2", "data.prior.steps=2"]
    if name == "shapes":
        more = ["evaluate.sampling.steps=2", "evaluate.every=2", "evaluate.sampling.prompts=[a dog]"]
    if name == "textual-inversion":
        more = ["data.captions.prefix=<sks> "]
    return reading.load(
        f"diffusion/{name}",
        [f"model.path={pipeline}", f"data.train={folder}", f"data.validation={folder}", "data.workers=0",
         "data.image.resolution=16", "data.image.step=4", "data.image.min_side=4", "data.batch.examples=2",
         f"data.cache.folder={place / ('cache-' + output)}", "train.epochs=null", "train.steps=4", "train.accumulate=1",
         "train.accelerator=cpu", "train.log_every=1", "optim.warmup=0", "evaluate.at_start=true", "evaluate.batch=4",
         f"output={place / output}", *more],
    )  # fmt: skip


def curve(folder: Path) -> list[tuple[str, str, str]]:
    names = ("train/loss", "train/gradient_norm", "validation/loss")
    rows = curves.read(folder / "curves.csv")
    return [(row["name"], row["step"], row["value"]) for row in rows if row["name"] in names]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = (folder / "checkpoints" / "last" / "model").resolve()
    found = {str(file.relative_to(model)): load_file(file) for file in model.rglob("*.safetensors")}
    return {f"{file} {key}": value for file, tensors in found.items() for key, value in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_check_finds_nothing_in_a_shipped_recipe(
    name: str, pipeline_of, folder, finds_nothing, tmp_path: Path
) -> None:
    assert finds_nothing(small(name, pipeline_of(RECIPES[name]), folder, tmp_path, "run"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_trains_stops_resumes_and_is_evaluated(
    name: str, pipeline_of, folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_before
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)
    pipeline = pipeline_of(RECIPES[name])
    whole = train(small(name, pipeline, folder, tmp_path, "whole")).folder
    assert train(small(name, pipeline, folder, tmp_path, "stopped"), [stop_before(2)]).stopped_by == signal.SIGTERM
    assert train(small(name, pipeline, folder, tmp_path, "stopped")).stopped_by == 0
    stopped = tmp_path / "stopped"
    assert curve(stopped) == curve(whole)
    assert len({value for kind, _, value in curve(whole) if kind == "train/loss"}) == 4
    expected, found = weights(whole), weights(stopped)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    best = whole / "checkpoints" / "best"
    metrics = evaluate_checkpoint(best).metrics
    validation = [float(value) for kind, step, value in curve(whole) if kind == "validation/loss" and int(step)]
    lower = "bf16" in (best / "recipe.yaml").read_text(encoding="utf-8")
    assert metrics["loss"] == pytest.approx(min(validation), rel=1e-3 if lower else 1e-6)
