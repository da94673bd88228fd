"""Encoder-decoder models from a recipe to a finished run: resumed bit for bit, evaluated from a checkpoint, saved."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as hf

from luthier.common import reading
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.modalities.asr.seq2seq import toy

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch"),
    pytest.mark.usefixtures("quick"),
]


KINDS = {
    "whole": ("moonshine", {"model": {"dropout": 0.1}, "data": {"augment": {"speed": [0.9, 1.1]}}}),
    "lora": ("moonshine", {"model": {"lora": {"rank": 4, "dropout": 0.1}, "freeze_encoder": True}}),
    "masks": ("canary", {"model": {"batch_norm": "train"}, "data": {"augment": {"time_masks": 1}},
                         "task": {"prompt": ["<|{language}|>"]}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_an_uninterrupted_one(kind, make_recipe, model_of, manifest, tmp_path, resumes_exactly):
    """Fault 21; and the saved model alone gives the numbers of the run."""
    family, more = KINDS[kind]

    def recipe(output: str):
        data = {"validation": str(manifest), "batch": {"examples": 3}} | more.get("data", {})
        return make_recipe(
            model_of(family), data=data, model=more["model"], task=more.get("task", {}),
            optim={"learning_rate": 1e-2, "warmup": 2, "schedule": "cosine"}, train={"steps": 5, "log_every": 1},
            evaluate={"every": 3, "max_new_tokens": 8}, checkpoint={"every": 2}, output=str(tmp_path / output),
        )  # fmt: skip

    resumes_exactly(recipe, steps=5, before=3)


def test_frozen_parts_stay(make_task, model_of):
    task = make_task(model_of("moonshine"), model={"freeze_encoder": True})
    trained = {name for name, parameter in task.speech.named_parameters() if parameter.requires_grad}
    assert trained
    assert not any("encoder." in name and "encoder_attn" not in name for name in trained)


@pytest.mark.parametrize("family", ["moonshine", "canary", "speech_to_text"])
def test_what_is_saved_loads_in_transformers(make_task, model_of, collated, tmp_path, family):
    """Learned by heart, saved, loaded by transformers alone: the same text."""
    task = make_task(model_of(family), evaluate={"max_new_tokens": 20})
    data = collated(task.processing, (0, 1))
    task.train_mode()
    optimizer = torch.optim.Adam(task.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = task.loss(data)
        (loss.sum / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
    task.eval()
    with torch.no_grad():
        said = task.transcribe(data)
    assert said == ["hello world", "ciao bella"]
    task.save_pretrained(tmp_path)
    model = hf.AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path).eval()
    processor = hf.AutoProcessor.from_pretrained(tmp_path)
    for row, text in enumerate(said):
        features = data["features"][row : row + 1, : data["lengths"][row]]
        ids = model.generate(features, max_new_tokens=20, decoder_input_ids=torch.tensor([[1]]))
        assert processor.tokenizer.decode(ids[0], skip_special_tokens=True).strip() == text


# ---------------------------------------------------------------------------------------------- shipped recipes


@pytest.mark.parametrize("name", ["asr/moonshine", "asr/moonshine-toy"])
def test_a_shipped_recipe_trains_stops_resumes_and_is_evaluated(name, model_of, manifest, tmp_path, trains_as_shipped):
    def recipe(output: str):
        options = [
            f"model.path={model_of('moonshine')}", f"data.train={manifest}", f"data.validation={manifest}",
            "data.test=[]", "data.workers=0", "data.batch.examples=4", "train.epochs=2", "train.accelerator=cpu",
            "train.threads=1", "train.log_every=1", "optim.warmup=0", "optim.learning_rate=5e-3", "evaluate.every=2",
            "evaluate.max_new_tokens=8", f"output={tmp_path / output}",
        ]  # fmt: skip
        return reading.load(name, options)

    trains_as_shipped(recipe, utterances=8)


def test_the_toy_is_made_once_and_its_model_writes_every_sentence(tmp_path, monkeypatch, make_processing):
    pytest.importorskip("espeakng_loader")
    monkeypatch.setattr(toy, "make_speech", partial(toy.make_speech, train=4, validation=2, test=2))
    assert toy.prepare(tmp_path / "toy")
    assert not toy.prepare(tmp_path / "toy")
    rows = tmp_path / "toy" / "speech" / "train.jsonl"
    processing = make_processing(str(tmp_path / "toy" / "model"), data={"train": str(rows)})
    example = next(iter(processing.read(processing.recipe.data.train[0])))
    assert processing.tokenizer.decode(processing.text(example), skip_special_tokens=True) == example.text
    assert not processing.unknown(example)


@pytest.mark.slow
def test_the_toy_learns(tmp_path):
    """From nothing to sentences that it never saw, half of them in a voice that it never heard."""
    toy.prepare(tmp_path)
    places = {"model.path": "model", "output": "run"}
    places |= {f"data.{name}": f"speech/{name}.jsonl" for name in ("train", "validation", "test")}
    recipe = reading.load("asr/moonshine-toy", [f"{key}={tmp_path / place}" for key, place in places.items()])
    best = train(recipe).folder / "checkpoints" / "best"
    assert evaluate_checkpoint(best, "test").metrics["wer"] < 0.1
