"""Whisper from a recipe to a finished run: what the folder holds, and that others can load the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soundfile as sf
import torch
import transformers as hf
from peft import PeftModel

from luthier.common.errors import DataError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training import curves
from luthier.common.training.run import train


@pytest.fixture(scope="module")
def rows(manifest) -> str:
    """The 12 tones and, as row 5, a file that is no audio."""
    lines = manifest.read_text(encoding="utf-8").splitlines()
    (manifest.parent / "broken.wav").write_bytes(b"this is no audio" * 100)
    lines.insert(4, json.dumps({"audio": "broken.wav", "text": "never heard", "language": "en"}))
    file = manifest.parent / "with_broken.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def finished(make_recipe, multilingual, manifest, rows, tmp_path_factory):
    """(folder, outcome) of 6 steps with an evaluation after every 3."""
    folder = tmp_path_factory.mktemp("runs") / "whisper"
    recipe = make_recipe(
        multilingual,
        data={"train": rows, "validation": str(manifest), "max_bad": 0.2, "batch": {"examples": 4}},
        optim={"learning_rate": 3e-3, "warmup": 0},
        train={"steps": 6, "log_every": 1},
        evaluate={"every": 3, "slices": ["language", "speaker", "duration"], "max_new_tokens": 20, "samples": 4},
        output=str(folder),
    )
    return folder, train(recipe)


def read(file: Path):
    return json.loads(file.read_text(encoding="utf-8"))


def test_metrics(finished):
    folder, outcome = finished
    metrics = read(folder / "metrics.json")
    assert outcome.metrics == metrics
    assert outcome.stopped_by == 0
    for name in ("wer", "wer_raw", "cer", "cer_raw", "loss"):
        assert metrics[name] >= 0, name
    assert metrics["utterances"] == 12
    slices = metrics["slices"]
    assert slices.keys() == {"language", "speaker", "duration"}
    assert {name: value["utterances"] for name, value in slices["language"].items()} == {"en": 6, "it": 4, "zh": 2}
    assert {name: value["utterances"] for name, value in slices["speaker"].items()} == {"a": 6, "b": 6}
    assert {name: value["utterances"] for name, value in slices["duration"].items()} == {"<1 s": 4, "1-3 s": 8}
    assert all({"wer", "wer_raw", "cer"} <= value.keys() for value in slices["language"].values())


def test_training_lowers_the_loss(finished):
    folder, _ = finished
    losses = [float(row["value"]) for row in curves.read(folder / "curves.csv") if row["name"] == "train/loss"]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]


def test_a_corrupt_file_is_named_and_counted(finished):
    folder, _ = finished
    report = read(folder / "data.json")
    assert report["train"]["dropped"] == {"corrupt_audio": 1}
    assert (report["train"]["rows"], report["train"]["kept_rows"], report["train"]["examples"]) == (13, 12, 12)
    (line,) = report["train"]["named"]["corrupt_audio"]
    assert "with_broken.jsonl:5" in line
    assert "broken.wav" in line
    assert report["validation"]["dropped"] == {}
    # 0.6, 0.7, ... 1.7 s
    assert report["train"]["seconds"] == pytest.approx(13.8, abs=0.01)


@pytest.mark.parametrize("policy", [{"on_bad": "raise"}, {"max_bad": 0.05}])
def test_too_many_bad_rows_refuse_the_run(make_recipe, multilingual, rows, tmp_path, policy):
    recipe = make_recipe(multilingual, data={"train": rows, **policy}, output=str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"with_broken\.jsonl:5"):
        train(recipe)
    assert not (tmp_path / "out").exists()


def test_the_best_model_loads_and_speaks(finished, manifest):
    folder, _ = finished
    best = folder / "checkpoints" / "best" / "model"
    model = hf.WhisperForConditionalGeneration.from_pretrained(best)
    processor = hf.WhisperProcessor.from_pretrained(best)
    wave = sf.read(manifest.parent / "0.wav", dtype="float32")[0]
    inputs = processor(audio=wave, sampling_rate=16000, return_tensors="pt")
    ids = model.generate(inputs.input_features, language="it", task="transcribe", max_new_tokens=20)
    assert ids.shape[0] == 1
    assert isinstance(processor.batch_decode(ids, skip_special_tokens=True)[0], str)


def test_the_saved_model_is_the_one_that_was_scored(finished, make_task, multilingual, manifest):
    """The numbers of the run can be had again from the checkpoint alone."""
    folder, _ = finished
    again = evaluate_checkpoint(folder / "checkpoints" / "best")
    metrics = read(folder / "checkpoints" / "best" / "metrics.json")
    for name in ("wer", "wer_raw", "cer", "cer_raw"):
        assert again.metrics[name] == metrics[name]
    assert again.metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("more", [{}, {"freeze_encoder": True}])
def test_an_adapter_run_with_a_cache_and_ctc(make_recipe, multilingual, manifest, tmp_path, more):
    """What needs the most parts at once, evaluated again from its checkpoint alone."""
    recipe = make_recipe(
        multilingual,
        task={"ctc_weight": 0.1, "timestamps": True},
        model={"lora": {"rank": 4, "alpha": 8, "dropout": 0.1}, **more},
        data={"train": str(manifest), "validation": str(manifest), "cache": {"folder": str(tmp_path / "cache")}},
        optim={"learning_rate": 1e-2},
        train={"steps": 2},
        evaluate={"max_new_tokens": 8},
        output=str(tmp_path / "out"),
    )
    outcome = train(recipe)
    best = tmp_path / "out" / "checkpoints" / "best"
    base = hf.WhisperForConditionalGeneration.from_pretrained(multilingual)
    model = PeftModel.from_pretrained(base, str(best / "model"))
    assert any(parameter.abs().sum() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)
    again = evaluate_checkpoint(best)
    assert again.metrics["wer"] == outcome.metrics["wer"]
    assert again.metrics["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_an_english_only_run_in_bfloat16(make_recipe, english, manifest, tmp_path, precision):
    recipe = make_recipe(
        english,
        task={"ctc_weight": 0.1},
        model={"audio_context": "dynamic"},
        data={"train": str(manifest), "validation": str(manifest)},
        train={"steps": 2, "precision": precision},
        evaluate={"max_new_tokens": 8, "audio_context": "dynamic"},
        output=str(tmp_path / "out"),
    )
    metrics = train(recipe).metrics
    best = tmp_path / "out" / "checkpoints" / "best"
    model = hf.WhisperForConditionalGeneration.from_pretrained(best / "model")
    assert model.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    again = evaluate_checkpoint(best)
    assert again.metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert again.metrics["wer"] == metrics["wer"]


def test_long_recordings_are_scored_as_a_whole(finished):
    """Tones of 0.6 to 1.7 s; the 7 above 1.05 s are cut, in halves as nobody speaks, and all 12 are scored."""
    pytest.importorskip("silero_vad")
    best, short = finished[0] / "checkpoints" / "best", ["data.audio.max_seconds=1.05", "data.max_bad=0.9"]
    assert evaluate_checkpoint(best, overrides=short).metrics["utterances"] == 5
    found = evaluate_checkpoint(best, overrides=[*short, "data.audio.voice={}", "evaluate.samples=12"])
    whole = evaluate_checkpoint(best, overrides=["evaluate.samples=12"])
    assert found.metrics["utterances"] == 12
    assert found.metrics["words"] == whole.metrics["words"]
    for cut, one in list(zip(found.samples, whole.samples, strict=True))[:5]:
        assert cut == one
