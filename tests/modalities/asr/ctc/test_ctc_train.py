"""CTC models from a recipe to a finished run: resumed bit for bit, in two processes, evaluated from a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from luthier.common import reading
from luthier.common.errors import CheckpointError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch"),
    pytest.mark.usefixtures("quick"),
]

RUN = """
import json, os, sys
os.fsync = lambda _: None
from luthier.common import reading
from luthier.common.training.run import train
for tree in json.loads(open(sys.argv[1]).read()):
    train(reading.build(tree, "test.yaml"))
"""


KINDS = {
    "masks": ("wav2vec2:group", {"model": {"mask": {"time_probability": 0.3, "time_length": 4}, "layerdrop": 0.3,
                                           "dropout": 0.2, "freeze_feature_encoder": False}}),
    "new": ("wav2vec2:layer", {"task": {"vocabulary": "new"}, "data": {"augment": {"speed": [0.9, 1.0, 1.1]}}}),
    "lora": ("wav2vec2:layer", {"model": {"lora": {"rank": 4, "dropout": 0.2, "target_modules": ["q_proj", "v_proj"]}},
                                "task": {"vocabulary": "extend"}}),
    "cache": ("wav2vec2-bert", {"data": {"cache": {"folder": "cache"}, "augment": {"time_masks": 2}}}),
    "norms": ("parakeet_ctc", {"model": {"batch_norm": "train", "dropout": 0.1}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_an_uninterrupted_one(kind, make_recipe, model_of, manifest, tmp_path, resumes_exactly):
    """Fault 21: masks, left out layers, dropout and augmentation draw the same again."""
    family, more = KINDS[kind]
    path = model_of(family)

    def recipe(output: str):
        data = {"validation": str(manifest), "batch": {"examples": 3}} | more.get("data", {})
        if "cache" in data:
            data["cache"] = {"folder": str(tmp_path / f"cache-{output}")}
        return make_recipe(
            path, data=data, model=more.get("model", {}), task=more.get("task", {}),
            optim={"learning_rate": 1e-2, "warmup": 2, "schedule": "cosine"},
            train={"steps": 7, "log_every": 1}, evaluate={"every": 3}, checkpoint={"every": 2},
            output=str(tmp_path / output),
        )  # fmt: skip

    resumes_exactly(recipe, steps=7, before=4)


def test_data_with_another_vocabulary_do_not_go_on(make_recipe, wav2vec2, changed, tmp_path, stop_before):
    def recipe(*texts: str):
        data = {"train": changed("moving", *texts)}
        return make_recipe(
            wav2vec2, data=data, task={"vocabulary": "new"}, train={"steps": 4}, checkpoint={"every": 1},
            output=str(tmp_path / "out"),
        )  # fmt: skip

    assert train(recipe("ab", "ba"), [stop_before(2)]).stopped_by == signal.SIGTERM
    with pytest.raises(CheckpointError, match="vocabulary"):
        train(recipe("ac", "ca"))
    assert train(recipe("ab", "ba")).stopped_by == 0


# Batches are bucketed by nothing, so that the two runs have the same examples in each step; nothing is random but what
# is drawn for each batch, which differs: so no dropout. Masks and layers are left out in `layerdrop` with probability
# near 1, so that in both runs every layer is.
JOBS = {
    "group": ("wav2vec2:group", {}),
    "layerdrop": ("wav2vec2:layer", {"model": {"layerdrop": 0.9999999}}),
    "lora": ("wav2vec2:layer", {"model": {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}}}),
    "parakeet": ("parakeet_ctc", {}),
}


@pytest.fixture(scope="module")
def pair(make_recipe, model_of, manifest, tmp_path_factory):
    """(folder of the runs, recipe of a job): all of the jobs on 2 processes, as starting them takes longest."""
    root = tmp_path_factory.mktemp("pair")

    def recipe(name: str, output: str, examples: int, **machine):
        family, more = JOBS[name]
        data = {"validation": str(manifest), "batch": {"examples": examples, "bucket_batches": 0}}
        return make_recipe(
            model_of(family), data=data, model=more.get("model", {}),
            optim={"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.05},
            train={"steps": 3, "log_every": 1, **machine}, output=str(root / output),
        )  # fmt: skip

    trees = [recipe(name, f"{name}-two", 2, devices=2, strategy="ddp").model_dump(mode="json") for name in JOBS]
    (root / "trees.json").write_text(json.dumps(trees))
    (root / "run.py").write_text(RUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(root / "run.py"), str(root / "trees.json")], capture_output=True, text=True, check=False,
        env=environment, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return root, recipe


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_equal_one_with_the_whole_batch(pair, left, name):
    """Fault 18; ragged texts, so that means of means would differ."""
    root, recipe = pair
    train(recipe(name, f"{name}-one", 4))
    expected, found = left.weights(root / f"{name}-one"), left.weights(root / f"{name}-two")
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=3e-6, msg=key)
    for curve in ("train/loss", "train/gradient_norm", "validation/loss"):
        wanted = left.values(root / f"{name}-one", curve)
        assert wanted
        assert left.values(root / f"{name}-two", curve) == pytest.approx(wanted, rel=1e-5), curve


def test_mixed_precision(make_recipe, model_of, manifest, tmp_path):
    for family in ("wav2vec2:group", "wav2vec2-bert"):
        recipe = make_recipe(
            model_of(family), data={"validation": str(manifest)}, train={"steps": 2, "precision": "bf16-mixed"},
            output=str(tmp_path / family.replace(":", "-")),
        )  # fmt: skip
        assert train(recipe).metrics["loss"] > 0
        state = load_file(Path(recipe.output) / "checkpoints" / "best" / "model" / "model.safetensors")
        assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}


def test_a_checkpoint_is_evaluated_in_other_ways(make_recipe, model_of, manifest, tmp_path):
    """In pieces as in live use, and with a beam; both from the checkpoint alone."""
    recipe = make_recipe(
        model_of("wav2vec2:layer"), data={"validation": str(manifest)}, train={"steps": 2}, output=str(tmp_path / "out")
    )
    train(recipe)
    best = tmp_path / "out" / "checkpoints" / "best"
    plain = evaluate_checkpoint(best).metrics
    whole = evaluate_checkpoint(best, overrides=["evaluate.stream.chunk_seconds=60"]).metrics
    assert {name: plain[name] for name in ("wer", "cer")} == {name: whole[name] for name in ("wer", "cer")}
    pieces = evaluate_checkpoint(
        best, overrides=["evaluate.stream.chunk_seconds=0.2", "evaluate.stream.left_seconds=0.2"]
    )
    assert pieces.metrics["utterances"] == 8
    assert evaluate_checkpoint(best, overrides=["evaluate.num_beams=4"]).metrics["utterances"] == 8


@pytest.mark.parametrize("name", ["asr/wav2vec2-ctc", "asr/wav2vec2-ctc-toy"])
def test_a_shipped_recipe_trains_stops_resumes_and_is_evaluated(name, model_of, manifest, tmp_path, trains_as_shipped):
    def recipe(output: str):
        options = [
            f"model.path={model_of('wav2vec2:layer')}", f"data.train={manifest}", f"data.validation={manifest}",
            "data.test=[]", "data.workers=0", "data.batch.examples=4", "train.epochs=2", "train.accelerator=cpu",
            "train.threads=1", "train.log_every=1", "optim.warmup=0", "optim.learning_rate=3e-3", "evaluate.every=3",
            f"output={tmp_path / output}",
        ]  # fmt: skip
        return reading.load(name, options)

    trains_as_shipped(recipe, utterances=8)


def test_long_recordings_are_scored_as_a_whole(make_recipe, wav2vec2, manifest, tmp_path):
    """Of 0.6 to 1.3 s, those above 1.05 s are cut; nobody speaks in them, so in halves. Without, they are refused."""
    pytest.importorskip("silero_vad")
    recipe = make_recipe(
        wav2vec2, data={"validation": str(manifest), "max_bad": 0.5}, train={"steps": 1}, output=str(tmp_path / "out")
    )
    train(recipe)
    best, short = tmp_path / "out" / "checkpoints" / "best", "data.audio.max_seconds=1.05"
    assert evaluate_checkpoint(best, overrides=[short]).metrics["utterances"] == 5
    found = evaluate_checkpoint(best, overrides=[short, "data.audio.voice={}", "evaluate.samples=8"])
    assert found.metrics["utterances"] == 8
    whole = evaluate_checkpoint(best, overrides=["evaluate.samples=8"])
    assert [one["reference"] for one in found.samples] == [one["reference"] for one in whole.samples]
    for cut, one in list(zip(found.samples, whole.samples, strict=True))[:5]:
        assert cut["hypothesis"] == one["hypothesis"]


def test_the_toy_is_made_once_and_starts_without_a_vocabulary(tmp_path, monkeypatch):
    pytest.importorskip("espeakng_loader")
    from functools import partial

    from luthier.modalities.asr.ctc import toy
    from luthier.modalities.asr.ctc.task import Task

    monkeypatch.setattr(toy, "make_speech", partial(toy.make_speech, train=4, validation=2, test=2))
    root = tmp_path / "toy"
    assert toy.prepare(root)
    assert not toy.prepare(root)
    options = [f"data.{name}={root}/speech/{name}.jsonl" for name in ("train", "validation", "test")]
    recipe = reading.load("asr/wav2vec2-ctc-toy", [f"model.path={root}/model", *options, f"output={root}/run"])
    task = Task(recipe)
    tokens = task.processing.vocabulary.tokens
    assert tokens[:3] == ["<pad>", "<unk>", "|"]
    assert task.speech.lm_head.out_features == task.speech.config.vocab_size == len(tokens)
