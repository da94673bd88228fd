"""Paraformer from a recipe to a finished run: resumed bit for bit, in two processes, saved as FunASR has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import soundfile as sf
import torch

from luthier.common import reading
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.modalities.asr.paraformer import toy

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch"),
    pytest.mark.usefixtures("quick"),
]

RUN = """
import json, os, sys
import torch
os.fsync = lambda _: None
from luthier.common import reading
from luthier.common.training.run import train
for tree in json.loads(open(sys.argv[1]).read()):
    train(reading.build(tree, "test.yaml"))
"""


@pytest.fixture(scope="module")
def finished(make_recipe, sanm, manifest, tmp_path_factory):
    """(folder, outcome) of 12 steps with an evaluation after every 6."""
    folder = tmp_path_factory.mktemp("runs") / "paraformer"
    recipe = make_recipe(
        sanm,
        data={"train": str(manifest), "validation": str(manifest), "workers": 0, "batch": {"seconds": 5.0}},
        optim={"learning_rate": 3e-3, "warmup": 0},
        train={"steps": 12, "log_every": 1, "accelerator": "cpu", "threads": 1},
        evaluate={"every": 6, "samples": 4},
        output=str(folder),
    )
    return folder, train(recipe)


def test_metrics_and_curves(finished, left):
    folder, outcome = finished
    metrics = json.loads((folder / "metrics.json").read_text())
    assert outcome.metrics == metrics
    assert metrics["utterances"] == 12
    assert metrics["slices"]["language"]["zh"]["utterances"] == 12
    for name in ("loss", "attention", "predictor"):
        assert len(left.values(folder, f"train/{name}")) == 12
    losses = left.values(folder)
    assert losses[-1] < 0.8 * losses[0]
    parts = [left.values(folder, f"train/{name}")[0] for name in ("attention", "predictor")]
    assert sum(parts) == pytest.approx(losses[0], rel=1e-4)  # the predictor's weight is 1


def test_what_is_saved_is_funasr_s_form(finished):
    folder, _ = finished
    model = folder / "checkpoints" / "best" / "model"
    assert {file.name for file in model.iterdir()} == {"config.yaml", "model.pt", "tokens.json", "am.mvn"}
    assert "dither: 0.0" in (model / "config.yaml").read_text()


def test_the_saved_model_is_the_one_that_was_scored(finished):
    """The numbers of the run can be had again from the checkpoint alone."""
    best = finished[0] / "checkpoints" / "best"
    again = evaluate_checkpoint(best).metrics
    metrics = json.loads((best / "metrics.json").read_text())
    for name in ("wer", "wer_raw", "cer", "cer_raw"):
        assert again[name] == metrics[name]
    assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_longer_recordings_are_cut_transcribed_in_pieces_and_scored_as_a_whole(finished):
    """What is said in a piece isn't known, so that the loss is that of the recordings that were not cut (5 of 12, of
    0.6 to 1.0 s). One by one, as FunASR's models see a little of the padding."""
    pytest.importorskip("silero_vad")
    best = finished[0] / "checkpoints" / "best"
    short = ["data.audio.max_seconds=1.05", "data.max_bad=0.9", "evaluate.batch=1", "evaluate.samples=12"]
    only = evaluate_checkpoint(best, overrides=short)
    assert only.metrics["utterances"] == 5
    found = evaluate_checkpoint(best, overrides=[*short, "data.audio.voice={}"])
    assert found.metrics["utterances"] == 12
    assert found.metrics["loss"] == pytest.approx(only.metrics["loss"], rel=1e-5)
    assert found.samples[:5] == only.samples
    whole = evaluate_checkpoint(best, overrides=["evaluate.batch=1", "evaluate.samples=12"]).samples
    assert [one["reference"] for one in found.samples] == [one["reference"] for one in whole]


KINDS = {
    "whole": ("conformer", {}),
    "frozen": ("conformer", {"model": {"freeze": ["encoder"]}}),
    "adapter": ("sanm", {"model": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.1}}}),
    "new_tokens": ("sanm", {"model": {"new_tokens": ["甲", "乙"], "lora": {"rank": 4}}}),
    "varied": ("sanm", {"data": {"augment": {"speed": [0.9, 1.1], "time_masks": 1}}, "model": {"dither": 1.0}}),
    "cached": ("conformer", {"data": {"cache": {}}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_an_uninterrupted_one(kind, request, make_recipe, manifest, tmp_path, resumes_exactly):
    """Fault 21; masks, sampler and dropout draw the same again."""
    name, more = KINDS[kind]
    path = request.getfixturevalue(name)

    def recipe(output: str):
        data = {"train": str(manifest), "validation": str(manifest), "workers": 0, "batch": {"examples": 4}}
        data |= more.get("data", {})
        if "cache" in data:
            data["cache"] = {"folder": str(tmp_path / f"cache-{output}")}
        return make_recipe(
            path, data=data, model={"path": path, **more.get("model", {})},
            optim={"learning_rate": 1e-2, "warmup": 2, "schedule": "cosine"},
            train={"steps": 7, "accelerator": "cpu", "threads": 1, "log_every": 1},
            evaluate={"every": 3}, checkpoint={"every": 2}, output=str(tmp_path / output),
        )  # fmt: skip

    resumes_exactly(recipe, steps=7, before=4)


def test_data_workers_change_nothing(make_recipe, conformer, manifest, tmp_path, left):
    curves = []
    for workers in (0, 2):
        data = {"train": str(manifest), "workers": workers, "batch": {"examples": 4}, "augment": {"speed": [0.9, 1.1]}}
        recipe = make_recipe(
            conformer, data=data, model={"path": conformer, "dither": 1.0},
            train={"steps": 4, "log_every": 1, "accelerator": "cpu", "threads": 1}, output=str(tmp_path / str(workers)),
        )  # fmt: skip
        curves.append(left.curve(train(recipe).folder))
    assert curves[0] == curves[1]


def test_two_processes_equal_one_with_the_whole_batch(make_recipe, directory_of, manifest, tones, tmp_path, left):
    """Ragged texts, so that means of means would differ; nothing random, and recordings of one length, as FunASR's
    models see a little of the padding."""
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    (tmp_path / "audio").mkdir()
    for number, row in enumerate(rows):
        sf.write(tmp_path / "audio" / f"{number}.wav", tones(number, 1.2), 16000, subtype="PCM_16")
        row["audio"] = f"audio/{number}.wav"
    level = tmp_path / "level.jsonl"
    level.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory_of(
        "sanm", model_conf={"sampling_ratio": 0.0}, encoder_conf={"dropout_rate": 0.0, "positional_dropout_rate": 0.0},
        decoder_conf={"dropout_rate": 0.0, "positional_dropout_rate": 0.0}, predictor_conf={"dropout": 0.0},
    )  # fmt: skip

    def recipe(output: str, examples: int, **machine):
        return make_recipe(
            path,
            data={"train": str(level), "validation": str(level), "workers": 0,
                  "batch": {"examples": examples, "bucket_batches": 0}},
            optim={"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.1},
            train={"steps": 3, "accelerator": "cpu", "threads": 1, "log_every": 1, **machine},
            output=str(tmp_path / output),
        )  # fmt: skip

    tree = recipe("two", 2, devices=2, strategy="ddp").model_dump(mode="json")
    (tmp_path / "trees.json").write_text(json.dumps([tree]))
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "trees.json")], capture_output=True, text=True,
        check=False, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    train(recipe("one", 4))
    files = [left.model(tmp_path / name) / "model.pt" for name in ("one", "two")]
    expected, found = (torch.load(file, weights_only=True) for file in files)
    start = torch.load(Path(path) / "model.pt", weights_only=True)
    assert expected.keys() == found.keys()
    assert any(not torch.equal(value, start[name]) for name, value in expected.items())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)
    for curve in ("train/loss", "train/gradient_norm", "validation/loss"):
        wanted = left.values(tmp_path / "one", curve)
        assert wanted
        assert left.values(tmp_path / "two", curve) == pytest.approx(wanted, rel=1e-5), curve


def test_mixed_precision(make_recipe, sanm, conformer, manifest, tmp_path):
    for name, path in (("sanm", sanm), ("conformer", conformer)):
        recipe = make_recipe(
            path, data={"train": str(manifest), "validation": str(manifest), "workers": 0},
            train={"steps": 2, "precision": "bf16-mixed", "accelerator": "cpu", "threads": 1},
            output=str(tmp_path / name),
        )  # fmt: skip
        metrics = train(recipe).metrics
        assert metrics["loss"] > 0
        state = torch.load(tmp_path / name / "checkpoints" / "best" / "model" / "model.pt", weights_only=True)
        assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}


# ---------------------------------------------------------------------------------------------- shipped recipes


@pytest.mark.parametrize("name", ["asr/paraformer", "asr/paraformer-toy"])
def test_a_shipped_recipe_trains_stops_resumes_and_is_evaluated(name, sanm, manifest, tmp_path, trains_as_shipped):
    def recipe(output: str):
        options = [
            f"model.path={sanm}", f"data.train={manifest}", f"data.validation={manifest}", "data.test=[]",
            "data.workers=0", "data.batch.examples=4", "train.epochs=2", "train.accelerator=cpu", "train.threads=1",
            "train.log_every=1", "optim.warmup=0", "optim.learning_rate=5e-3", "evaluate.every=3",
            f"output={tmp_path / output}",
        ]  # fmt: skip
        return reading.load(name, options)

    trains_as_shipped(recipe, utterances=12)


def test_the_toy_is_made_once_and_its_model_writes_every_sentence(tmp_path, monkeypatch, make_processing):
    few = partial(toy.make_speech, train=4, validation=2, test=2)
    monkeypatch.setattr(toy, "make_speech", few)
    assert toy.prepare(tmp_path / "toy")
    assert not toy.prepare(tmp_path / "toy")
    rows = tmp_path / "toy" / "speech" / "train.jsonl"
    processing = make_processing(str(tmp_path / "toy" / "model"), data={"train": str(rows)})
    for text in ("take the red box upstairs", "push the white mirror"):
        assert processing.tokens.written(processing.tokens.encode(text)) == text.split()


@pytest.mark.slow
def test_the_toy_learns(tmp_path):
    """From nothing to sentences that it never saw, half of them in a voice that it never heard."""
    toy.prepare(tmp_path)
    places = {"model.path": "model", "output": "run"}
    places |= {f"data.{name}": f"speech/{name}.jsonl" for name in ("train", "validation", "test")}
    recipe = reading.load("asr/paraformer-toy", [f"{key}={tmp_path / place}" for key, place in places.items()])
    best = train(recipe).folder / "checkpoints" / "best"
    assert evaluate_checkpoint(best, "test").metrics["wer"] < 0.1
