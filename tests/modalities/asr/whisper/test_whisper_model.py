"""Whisper's model: adapters, frozen parts, the encoder's cache, checkpointing, and what is saved for others to load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
import transformers as hf
from peft import PeftModel

from luthier.common.data.processing import Batch
from luthier.common.errors import ModelError
from luthier.modalities.asr.whisper import task as task_module
from luthier.modalities.asr.whisper.model import load_model, load_processor


def reference(path) -> hf.WhisperForConditionalGeneration:
    return hf.WhisperForConditionalGeneration.from_pretrained(path)


@pytest.fixture
def train():
    """`train(task, batch)`: a few steps, so that what is saved differs from where it began; the last gradients stay."""

    def steps(task, batch, number: int = 3):
        task.train_mode()
        optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], 3e-3)
        for _ in range(number):
            optimizer.zero_grad()
            task.loss(batch).sum.backward()
            optimizer.step()
        task.eval()
        return task

    return steps


def logits(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_features=batch["features"], labels=batch["labels"].clone()).logits


def loss(task, batch) -> float:
    with torch.no_grad():
        result = task.loss(batch)
    return float(result.sum) / result.count


# ---------------------------------------------------------------------------------------------- adapters

ADAPTERS = {
    "lora": {},
    "dora": {"dora": True},
    "rslora": {"rslora": True},
    "gaussian": {"init": "gaussian"},
    "pissa": {"init": "pissa"},
    "olora": {"init": "olora"},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*decoder.*\.fc1"},
    "dropout": {"dropout": 0.1},
    "saved too": {"modules_to_save": ["conv2"]},
}


def adapter(name: str, **more) -> dict:
    return {"lora": {"rank": 4, "alpha": 8, **ADAPTERS[name]}, **more}


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_an_adapter_is_trained_saved_and_loaded(make_task, multilingual, collated, train, tmp_path, name):
    task = make_task(multilingual, model=adapter(name))
    batch = collated(task.processing, (0, 1, 2))
    frozen = {n: p.detach().clone() for n, p in task.model.named_parameters() if not p.requires_grad}
    # It begins as its base: B is 0, or the base holds what the adapter adds (pissa, olora: rounding only).
    assert loss(task, batch) == pytest.approx(loss(make_task(multilingual), batch), rel=1e-4)
    before = loss(task, batch)
    train(task, batch)
    trained = {name for name, p in task.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n or "modules_to_save" in n for n in trained)
    assert loss(task, batch) < before
    assert all(p.grad is None for p in task.parameters() if not p.requires_grad)
    assert all(torch.equal(frozen[n], p) for n, p in task.model.named_parameters() if not p.requires_grad)

    # PEFT's own forward takes audio (with its sequence-to-sequence type it would not), and gives the same loss.
    assert task.model.peft_config["default"].task_type is None
    with torch.no_grad():
        whole = task.model(input_features=batch["features"], labels=batch["labels"]).loss
    assert float(whole) == pytest.approx(loss(task, batch), rel=1e-5)

    task.save_pretrained(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    assert not (tmp_path / "model.safetensors").exists()
    again = PeftModel.from_pretrained(reference(multilingual), str(tmp_path))
    torch.testing.assert_close(logits(again, batch), logits(task.model, batch), rtol=0, atol=1e-5)
    assert hf.WhisperProcessor.from_pretrained(tmp_path).tokenizer("hi").input_ids


@pytest.mark.parametrize("name", ["lora", "dora", "pissa", "saved too"])
def test_a_task_loads_its_adapter_again(make_task, multilingual, collated, train, tmp_path, name):
    task = make_task(multilingual, model=adapter(name))
    batch = collated(task.processing, (0, 1, 2))
    train(task, batch)
    task.save_pretrained(tmp_path)
    again = make_task(multilingual, weights=tmp_path, model=adapter(name))
    assert loss(again, batch) == pytest.approx(loss(task, batch), rel=1e-5)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in task.named_parameters() if p.requires_grad
    }


def test_scales_of_adapters(make_task, multilingual):
    """alpha / rank, and alpha / sqrt(rank) with rslora (arXiv:2312.03732)."""
    for name, scale in (("lora", 2.0), ("rslora", 4.0)):
        layer = make_task(multilingual, model=adapter(name)).whisper.model.decoder.layers[0].self_attn.q_proj
        assert layer.scaling["default"] == scale


def test_unknown_target_modules_are_refused(make_task, multilingual):
    with pytest.raises(ModelError, match=r"model\.lora\.target_modules"):
        make_task(multilingual, model={"lora": {"target_modules": ["query"]}})


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_a_model_is_refused(make_recipe, tmp_path, exists):
    path = tmp_path / "absent"
    if exists:
        path.mkdir()
    with pytest.raises(ModelError, match=r"model\.path"):
        load_processor(str(path))
    with pytest.raises(ModelError, match=r"model\.path"):
        load_model(make_recipe(str(path)), None)


# ---------------------------------------------------------------------------------------------- the whole model


@pytest.fixture
def saved(make_task, multilingual, collated, train, tmp_path):
    """(task, batch, folder) of a trained and saved multilingual model whose recipe says `it`."""
    task = make_task(multilingual, task={"language": "italian"})
    batch = collated(task.processing, (0, 1, 2, 3))
    train(task, batch)
    task.save_pretrained(tmp_path / "model")
    return task, batch, tmp_path / "model"


def test_a_saved_model_loads_in_transformers(saved):
    task, batch, folder = saved
    model, processor = reference(folder), hf.WhisperProcessor.from_pretrained(folder)
    assert torch.equal(logits(model, batch), logits(task.model, batch))
    assert not torch.equal(logits(model, batch), logits(reference(task.recipe.model.path), batch))
    first = batch["utterances"][0]
    features = processor(audio=sf.read(first.audio, dtype="float32")[0], sampling_rate=16000, return_tensors="pt")
    torch.testing.assert_close(features.input_features, batch["features"][:1], rtol=0, atol=1e-6)
    assert processor.tokenizer("hello", add_special_tokens=False).input_ids == [byte - ord("!") for byte in b"hello"]


def test_generation_is_the_same_after_saving(saved):
    """lang_to_id and task_to_id survive (faults/asr.md, 6)."""
    task, batch, folder = saved
    model = reference(folder)
    assert model.generation_config.lang_to_id == reference(task.recipe.model.path).generation_config.lang_to_id
    for language in ("it", "english", "<|zh|>"):
        settings = {"language": language, "task": "transcribe", "max_new_tokens": 12}
        expected = task.whisper.generate(input_features=batch["features"], **settings)
        assert torch.equal(model.generate(input_features=batch["features"], **settings), expected)
    # And again, as a run that begins with this folder would save it.
    model.save_pretrained(folder / "again")
    again = reference(folder / "again")
    assert torch.equal(again.generate(input_features=batch["features"], **settings), expected)


def test_a_saved_model_speaks_as_it_was_trained(saved):
    """Without arguments, generate() takes the recipe's language, task and timestamps."""
    task, batch, folder = saved
    model = reference(folder)
    config = model.generation_config
    assert (config.language, config.task, config.return_timestamps) == ("<|it|>", "transcribe", False)
    found = model.generate(input_features=batch["features"], max_new_tokens=12)
    settings = {"language": "it", "task": "transcribe", "max_new_tokens": 12}
    assert torch.equal(found, task.whisper.generate(input_features=batch["features"], **settings))
    assert config.suppress_tokens == task.whisper.generation_config.suppress_tokens


def test_generation_settings_of_other_recipes(make_task, multilingual, english):
    config = make_task(multilingual, task={"timestamps": True, "task": "translate"}).generation_config()
    assert (config.language, config.task, config.return_timestamps) == (None, "translate", True)
    config = make_task(english, task={"language": "en"}).generation_config()
    assert getattr(config, "language", None) is None
    assert getattr(config, "task", None) is None


def test_an_english_only_model_is_saved_and_generates(make_task, english, collated, train, tmp_path):
    task = make_task(english)
    batch = collated(task.processing, (0, 3, 4))
    train(task, batch)
    task.save_pretrained(tmp_path)
    model = reference(tmp_path)
    assert torch.equal(logits(model, batch), logits(task.model, batch))
    expected = task.whisper.generate(input_features=batch["features"], max_new_tokens=12)
    assert torch.equal(model.generate(input_features=batch["features"], max_new_tokens=12), expected)


def test_a_task_loads_what_it_saved(saved, make_task, multilingual):
    task, batch, folder = saved
    again = make_task(multilingual, weights=folder, task={"language": "italian"})
    assert loss(again, batch) == loss(task, batch)
    assert again.generation_config().to_dict() == task.generation_config().to_dict()
    assert again.processing.mel.settings == task.processing.mel.settings


def test_what_serving_needs_is_saved(saved):
    """faster-whisper and whisper.cpp's converter read preprocessor_config.json, which transformers 5 leaves out."""
    _, _, folder = saved
    names = {file.name for file in folder.iterdir()}
    assert {
        "config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "preprocessor_config.json",
    } <= names  # fmt: skip
    assert json.loads((folder / "preprocessor_config.json").read_text())["chunk_length"] == 2
    assert json.loads((folder / "generation_config.json").read_text())["lang_to_id"]["<|it|>"]


def changed_settings(path: str, folder: Path, **changes) -> str:
    """A copy of a model directory with other generation settings; None takes one out."""
    shutil.copytree(path, folder)
    settings = json.loads((folder / "generation_config.json").read_text()) | changes
    kept = {name: value for name, value in settings.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(kept))
    return str(folder)


def test_old_forced_decoder_ids_do_not_come_along(make_task, multilingual, tmp_path):
    """Old checkpoints force a language with them, beside which `language` would be ignored."""
    path = changed_settings(multilingual, tmp_path / "old", forced_decoder_ids=[[1, 259]])
    task = make_task(path, task={"language": "it"})
    assert getattr(task.generation_config(), "forced_decoder_ids", None) is None


def test_language_ids_of_a_model_built_in_code_are_kept(make_task, multilingual, tmp_path):
    """transformers drops them when it reads such a directory, though they stand in it."""
    path = changed_settings(multilingual, tmp_path / "built", _from_model_config=True)
    assert not hasattr(reference(path).generation_config, "lang_to_id")
    task = make_task(path, task={"language": "it"})
    task.save_pretrained(tmp_path / "model")
    config = reference(tmp_path / "model").generation_config
    assert config.lang_to_id == reference(multilingual).generation_config.lang_to_id
    assert config.task_to_id == reference(multilingual).generation_config.task_to_id


def test_timestamps_without_the_generation_setting_for_them(make_task, multilingual, collated, tmp_path):
    path = changed_settings(multilingual, tmp_path / "old", no_timestamps_token_id=None)
    texts = []
    for model in (multilingual, path):
        task = make_task(model, task={"timestamps": True}, evaluate={"max_new_tokens": 10}).eval()
        data = collated(task.processing, (0, 1))
        texts.append([record.hypothesis for record in task.predict(Batch(0, 0, (0, 1), data, 1.0, 1.0)).records])
    assert texts[0] == texts[1]


# ---------------------------------------------------------------------------------------------- frozen encoder


def modules(task, part: str) -> dict[str, torch.nn.Module]:
    return dict(getattr(task.whisper.model, part).named_modules())


def test_a_frozen_encoder_stays_as_it_is(make_task, multilingual, collated, train):
    task = make_task(multilingual, model={"freeze_encoder": True})
    batch = collated(task.processing, (0, 1, 2))
    weights = {name: p.detach().clone() for name, p in task.whisper.model.encoder.named_parameters()}
    task.train_mode()
    assert not any(module.training for module in modules(task, "encoder").values())
    assert modules(task, "decoder")[""].training
    assert all(module.training for module in modules(task, "decoder").values() if list(module.parameters()))
    train(task, batch)
    for name, parameter in task.whisper.model.encoder.named_parameters():
        assert not parameter.requires_grad
        assert parameter.grad is None
        assert torch.equal(parameter, weights[name])
    assert not any("encoder." in name for name in task.trained_names())
    assert any("decoder." in name for name in task.trained_names())
    task.eval()
    task.train_mode()
    assert not any(module.training for module in modules(task, "encoder").values())


@pytest.mark.parametrize("target", [["q_proj", "v_proj"], "all-linear", r".*\.fc1"])
def test_a_frozen_encoder_gets_no_adapter(make_task, multilingual, collated, train, target):
    lora = {"rank": 4, "target_modules": target}
    everywhere = make_task(multilingual, model={"lora": lora})
    assert any(".encoder." in name for name in everywhere.trained_names())
    task = make_task(multilingual, model={"lora": lora, "freeze_encoder": True})
    task.train_mode()
    names = {name for name, _ in task.named_parameters() if "lora_" in name}
    assert names
    assert all(".decoder." in name for name in names)
    assert not any(module.training for module in modules(task, "encoder").values())
    train(task, collated(task.processing, (0, 1)))
    assert all(p.grad is None for p in task.whisper.model.encoder.parameters())


# ---------------------------------------------------------------------------------------------- encoder cache


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """Batch sizes of the encoder's runs, as they are."""
    sizes: list[int] = []
    plain = task_module.encode

    def counted(whisper, features, real):
        sizes.append(len(features))
        return plain(whisper, features, real)

    monkeypatch.setattr(task_module, "encode", counted)
    return sizes


def cached(tmp_path: Path, **more) -> dict:
    return {"model": {"freeze_encoder": True, **more}, "data": {"cache": {"folder": str(tmp_path / "cache")}}}


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_the_frozen_encoder_runs_once_for_each_example(make_task, multilingual, collated, tmp_path, runs, lora):
    sections = cached(tmp_path, lora=lora)
    task = make_task(multilingual, **sections)
    task.train_mode()
    batch = collated(task.processing, (0, 1, 2))
    first = task.loss(batch)
    first.sum.backward()
    gradients = {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}
    assert runs == [3]
    task.zero_grad()
    second = task.loss(batch)
    second.sum.backward()
    assert runs == [3]
    assert torch.equal(first.sum, second.sum)
    assert all(torch.equal(gradients[name], p.grad) for name, p in task.named_parameters() if p.grad is not None)
    # In another batch, another process and in evaluation: only what is new is encoded.
    again = make_task(multilingual, **sections)
    again.eval()
    with torch.no_grad():
        again.loss(collated(again.processing, (2, 3, 0, 1)))
    assert runs == [3, 1]
    assert torch.equal(task.encode(batch), again.encode(batch))
    # Half precision is all that differs from a run without the cache.
    plain = make_task(multilingual, model=sections["model"])
    assert float(first.sum.detach()) == pytest.approx(float(plain.loss(batch).sum.detach()), rel=2e-3)


def test_other_weights_do_not_meet_in_the_cache(make_task, multilingual, collated, tmp_path, runs):
    """Two models of the same shape share a folder; each has its own encodings."""
    other = tmp_path / "other"
    torch.manual_seed(1)
    model = reference(multilingual)
    with torch.no_grad():
        model.model.encoder.conv1.weight.mul_(1.5)
    model.save_pretrained(other)
    for part in (hf.WhisperTokenizer, hf.WhisperFeatureExtractor):
        part.from_pretrained(multilingual).save_pretrained(other)
    one, two = (make_task(str(path), **cached(tmp_path)) for path in (multilingual, other))
    batches = [collated(task.processing, (0, 1)) for task in (one, two)]
    assert batches[0]["keys"] == batches[1]["keys"]
    encodings = [task.encode(batch) for task, batch in zip((one, two), batches, strict=True)]
    assert runs == [2, 2]
    assert not torch.allclose(*encodings, atol=1e-2)


def test_precisions_do_not_meet_in_the_cache(make_task, multilingual, collated, tmp_path, runs):
    """What a bfloat16 run encoded is not what a run in float32 would."""
    for number, precision in enumerate(("bf16-true", "32", "bf16-true"), 1):
        task = make_task(multilingual, **cached(tmp_path), train={"precision": precision})
        with torch.no_grad():
            task.loss(collated(task.processing, (0, 1)))
        assert runs == [2] * min(number, 2)


def test_what_varies_is_not_cached(make_task, multilingual, collated, tmp_path, runs):
    """An encoder that is trained; a short context, which depends on the batch; masks."""
    sections = cached(tmp_path, audio_context="dynamic", long_context_share=0)
    masked = cached(tmp_path)
    masked["data"] = masked["data"] | {"augment": {"time_masks": 1}}
    trained = cached(tmp_path, freeze_encoder=False)
    for number, settings in enumerate((sections, masked, trained), 1):
        task = make_task(multilingual, **settings)
        batch = collated(task.processing, (0, 1), np.random.default_rng(0))
        task.loss(batch)
        task.loss(batch)
        assert runs == [2, 2] * number


# ---------------------------------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("lora", [None, {"rank": 4, "dropout": 0.0}])
def test_gradient_checkpointing_gives_the_same_gradients(make_task, multilingual, collated, lora):
    found, runs = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        task = make_task(multilingual, model={"lora": lora}, train={"gradient_checkpointing": checkpointing})
        task.train_mode()
        counts = {"encoder": 0, "decoder": 0}
        for part in counts:
            attention = getattr(task.whisper.model, part).layers[0].self_attn.q_proj
            attention.register_forward_hook(
                lambda *_, counts=counts, part=part: counts.update({part: counts[part] + 1})
            )
        result = task.loss(collated(task.processing, (0, 1, 2)))
        result.sum.backward()
        found.append((result.sum, {name: p.grad for name, p in task.named_parameters() if p.grad is not None}))
        runs.append(counts)
    assert runs == [{"encoder": 1, "decoder": 1}, {"encoder": 2, "decoder": 2}]  # each layer ran again
    (one, gradients), (other, same) = found
    assert torch.equal(one, other)
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)
