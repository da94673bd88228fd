"""Speech-LLMs: masks by hand, loss, gradients and answers against transformers' own, runs resumed and saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import soundfile as sf
import torch
import transformers as hf

from luthier.common import reading
from luthier.common.data.processing import Batch
from luthier.common.errors import BadExample, DataError, ModelError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.modalities.asr.llm.turn import Turns

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch")

PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nTranscribe the speech.<|im_end|>\n<|im_start|>assistant\n"
)
"""As Qwen2-Audio's template writes it."""


def loaded(path: Any) -> tuple[Any, Any]:
    model = hf.Qwen2AudioForConditionalGeneration.from_pretrained(path).eval()
    return model, hf.AutoProcessor.from_pretrained(path)


def heard(processor: Any, utterance: Any, text: str) -> Any:
    wave = sf.read(utterance.audio, dtype="float32")[0]
    return processor(text=[text], audio=[wave], sampling_rate=16000, return_tensors="pt")


def batch(data: dict[str, Any]) -> Batch:
    return Batch(0, 0, tuple(range(len(data["utterances"]))), data, 1.0, 1.0)


def test_loss_begins_after_the_prompt_and_ends_with_the_turn(make_processing, speaking, collated):
    """0.6 s are 60 mel frames, 30 after the convolution, 15 after the pooling."""
    processing = make_processing(speaking)
    assert processing.turn(collated(processing, (0,))["utterances"][0]).prompt == PROMPT
    data = collated(processing, (0, 2))
    ids, labels = data["input_ids"][0].tolist(), data["labels"][0].tolist()
    place = processing.tokenizer.convert_tokens_to_ids
    assert ids.count(place("<|AUDIO|>")) == 15
    assert [label for label in labels if label != -100] == [*map(place, "hello world"), place("<|im_end|>")]
    first = labels.index(place("h"))
    assert processing.tokenizer.decode(ids[:first]) == PROMPT.replace("<|AUDIO|>", "<|AUDIO|>" * 15)
    shown = processing.show(data, 0)
    assert "".join(text for text, carries in shown.tokens if not carries) == PROMPT
    assert "".join(text for text, carries in shown.tokens if carries) == "hello world<|im_end|>"
    assert data["prompt_mask"].sum(1).tolist() == [first, len(data["prompts"][1])]
    assert data["prompts"][0, -first:].tolist() == ids[:first]


def test_loss_and_gradients_of_a_padded_batch_are_transformers_of_each_alone(make_task, speaking, collated):
    task = make_task(speaking)
    task.train_mode()
    data = collated(task.processing)
    found = task.loss(data)
    found.sum.backward()
    model, processor = loaded(speaking)
    total, count = 0.0, 0
    for utterance in data["utterances"]:
        inputs = heard(processor, utterance, f"{PROMPT}{utterance.text}<|im_end|>")
        number = len(utterance.text) + 1
        labels = torch.full_like(inputs["input_ids"], -100)
        labels[:, -number:] = inputs["input_ids"][:, -number:]
        loss = model(**inputs, labels=labels).loss * number
        loss.backward()
        total, count = total + float(loss), count + number
    assert found.count == count
    assert float(found.sum) == pytest.approx(total, rel=1e-5)
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or parameter.grad.norm() < 1e-4:
            continue
        one = task.speech.get_parameter(name).grad
        assert (one - parameter.grad).norm() < 1e-3 * parameter.grad.norm(), name
        compared += 1
    assert compared > 25


def test_answers_are_transformers_own(make_task, speaking, collated):
    task = make_task(speaking, evaluate={"max_new_tokens": 8}).eval()
    data = collated(task.processing)
    assert len(set(data["prompt_mask"].sum(1).tolist())) == 4
    model, processor = loaded(speaking)
    expected = []
    for utterance in data["utterances"]:
        inputs = heard(processor, utterance, PROMPT)
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=1)
        new = ids[0, inputs["input_ids"].shape[1] :]
        expected.append(processor.tokenizer.decode(new, skip_special_tokens=True).strip())
    assert [one.hypothesis for one in task.predict(batch(data)).records] == expected


def test_a_piece_of_a_long_recording_has_no_part_in_the_loss(make_task, speaking, examples):
    task = make_task(speaking, evaluate={"max_new_tokens": 2}).eval()
    processing, example = task.processing, examples(task.processing)[0]
    items = [processing.encode(item, None) for item in (example, replace(example, text="", whole=example))]
    found, alone = (task.predict(batch(processing.collate(part, None))) for part in (items, items[:1]))
    assert len(found.records) == 2
    assert found.loss.count == alone.loss.count == 12
    torch.testing.assert_close(found.loss.sum, alone.loss.sum, rtol=1e-5, atol=0)
    assert task.predict(batch(processing.collate(items[1:], None))).loss is None


def test_what_is_asked(make_processing, speaking, examples):
    section = {"instruction": "Write down the {language} speech.", "system": "Listen."}
    processing = make_processing(speaking, task=section)
    example = examples(processing)[1]
    said = processing.turn(example).prompt
    assert said.startswith("<|im_start|>system\nListen.<|im_end|>\n<|im_start|>user\nAudio 1: ")
    assert "\nWrite down the it speech.<|im_end|>" in said
    assert "\nWhat?<|im_end|>" in processing.turn(replace(example, prompt="What?")).prompt
    for change, reason in (
        ({"language": None}, "unknown_language"), ({"text": "a<|im_end|>b"}, "control_token"),
        ({"text": " "}, "no_text"),
    ):  # fmt: skip
        with pytest.raises(BadExample) as error:
            processing.check(replace(example, **change), True)
        assert error.value.reason == reason
    assert processing.audio.max_seconds == 2.0  # its extractor would clip what is longer


def test_a_template_that_writes_its_prompt_otherwise_is_refused(speaking):
    processor = hf.AutoProcessor.from_pretrained(speaking)
    before = processor.chat_template
    processor.chat_template = before.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>")
    assert processor.chat_template != before
    with pytest.raises(DataError, match="otherwise than after its own prompt"):
        Turns(processor)("Transcribe.", None, "text", "a:1")


def test_other_models_are_refused(tmp_path):
    from luthier.modalities.asr.llm.model import load_config

    hf.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not trained here"):
        load_config(str(tmp_path))


# ---------------------------------------------------------------------------------------------- runs


KINDS = {
    "parts": {"freeze_encoder": True},
    "adapter": {"lora": {"rank": 4, "dropout": 0.1}, "freeze_encoder": True},
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_an_uninterrupted_one(kind, make_recipe, speaking, manifest, tmp_path, resumes_exactly):
    """Fault 21; and the saved model alone gives the numbers of the run."""

    def recipe(output: str):
        data = {"validation": str(manifest), "batch": {"examples": 2}, "augment": {"speed": [0.9, 1.1]}}
        return make_recipe(
            speaking, data=data, model=KINDS[kind], optim={"learning_rate": 1e-2, "warmup": 2},
            train={"steps": 4, "log_every": 1}, evaluate={"every": 2, "max_new_tokens": 4}, checkpoint={"every": 2},
            output=str(tmp_path / output),
        )  # fmt: skip

    resumes_exactly(recipe, steps=4, before=3)


def test_frozen_parts_stay(make_task, speaking):
    for part, frozen in (
        ("freeze_encoder", ("audio_tower",)),
        ("freeze_language_model", ("language_model", "lm_head")),
    ):
        task = make_task(speaking, model={part: True})
        for name, parameter in task.speech.named_parameters():
            assert parameter.requires_grad != any(one in name for one in frozen), name


def test_what_is_saved_loads_in_transformers(make_task, speaking, collated, tmp_path):
    """Learned by heart, saved, loaded by transformers alone: the same text."""
    task = make_task(speaking, evaluate={"max_new_tokens": 20})
    data = collated(task.processing, (0, 1))
    task.train_mode()
    optimizer = torch.optim.Adam(task.parameters(), 1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        loss = task.loss(data)
        (loss.sum / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        said = task.eval().transcribe(data)
    assert said == ["hello world", "ciao bella"]
    task.save_pretrained(tmp_path)
    model, processor = loaded(tmp_path)
    for utterance, text in zip(data["utterances"], said, strict=True):
        inputs = heard(processor, utterance, PROMPT)
        ids = model.generate(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=1, pad_token_id=1)
        new = ids[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(new, skip_special_tokens=True) == text


@pytest.mark.usefixtures("quick")
def test_the_shipped_recipe_trains_and_is_evaluated(speaking, manifest, tmp_path):
    options = [
        f"model.path={speaking}", f"data.train={manifest}", f"data.validation={manifest}", "data.workers=0",
        "train.epochs=1", "train.accelerator=cpu", "train.threads=1", "train.precision='32'",
        "evaluate.max_new_tokens=4", f"output={tmp_path}",
    ]  # fmt: skip
    folder = train(reading.load("asr/qwen2-audio", options)).folder
    assert evaluate_checkpoint(folder / "checkpoints" / "best").metrics["utterances"] == 4
