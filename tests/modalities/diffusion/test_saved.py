"""What is saved loads with diffusers' own loaders and gives the picture of the training process exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from luthier.common.errors import ExportError, ModelError
from luthier.modalities.diffusion import adapters, kohya
from luthier.modalities.diffusion.merge import merge

TEXT = {"rank": 2, "alpha": 6}


def moved(task: Any, size: float = 0.3) -> Any:
    """Give everything that is trained other values, as a training would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in task.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return task.eval()


def same(first: np.ndarray, second: np.ndarray) -> bool:
    return bool(np.array_equal(first, second))


@pytest.fixture
def model_of(pipeline_of) -> Any:
    """`model_of("sd", **fields)`: the model section of a recipe."""
    return lambda name, **fields: {"path": pipeline_of(name), "lora": {"rank": 4, "alpha": 10}, **fields}


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("text", [False, True])
def test_fault_1_and_12_the_adapter_gives_the_same_picture(
    name: str, text: bool, make_task, model_of, fresh, image_of, pipeline_of, tmp_path: Path
) -> None:
    more = {"text_encoder_lora": TEXT} if text else {}
    task = moved(make_task(name, model=model_of(name, **more)))
    task.save_pretrained(tmp_path)
    expected = image_of(task.pipe)
    pipe = fresh(pipeline_of(name))
    before = image_of(pipe)
    assert not same(before, expected), "the adapter does something"
    pipe.load_lora_weights(str(tmp_path))
    assert same(image_of(pipe), expected)
    if text:
        for encoder in task.family.clip_encoders:
            assert f"{encoder}.lora_alpha" in adapters.read(tmp_path)[1]
            assert getattr(pipe, encoder).peft_config, "loaded into the text encoder too"


@pytest.mark.parametrize("lora", [{"rslora": True}, {"init": "gaussian"}, {"init": "orthogonal"}, {"dropout": 0.2}])
def test_fault_1_all_settings_of_an_adapter_are_kept(
    lora: Any, make_task, model_of, fresh, image_of, pipeline_of, tmp_path: Path
) -> None:
    task = moved(make_task("sd", model=model_of("sd", lora={"rank": 4, "alpha": 3, **lora})))
    task.save_pretrained(tmp_path)
    expected = image_of(task.pipe)
    pipe = fresh(pipeline_of("sd"))
    pipe.load_lora_weights(str(tmp_path))
    assert same(image_of(pipe), expected)
    with safe_open(str(tmp_path / adapters.FILE), "pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    assert settings["unet.lora_alpha"] == 3
    assert settings["unet.r"] == 4
    assert settings["unet.use_rslora"] == lora.get("rslora", False)


@pytest.mark.parametrize("name", ["sd", "sdxl"])
@pytest.mark.parametrize("rslora", [False, True])
def test_fault_2_kohya_s_form_gives_the_same_picture(
    name: str, rslora: bool, make_task, model_of, fresh, image_of, pipeline_of, tmp_path: Path
) -> None:
    lora = {"rank": 4, "alpha": 10, "rslora": rslora}
    task = moved(make_task(name, model=model_of(name, lora=lora, text_encoder_lora={**TEXT, "rslora": rslora})))
    task.save_pretrained(tmp_path)
    expected = image_of(task.pipe)
    kohya.export(tmp_path, tmp_path / "k.safetensors")
    tensors = load_file(tmp_path / "k.safetensors")
    scale = 2.0 if rslora else 1.0  # sqrt(4)
    alphas = {float(value) for key, value in tensors.items() if key.endswith(".alpha") and "lora_unet" in key}
    assert alphas == {10.0 * scale}, "its own alpha, and not the rank"
    texts = {key.partition("_text_model")[0] for key in tensors if "text_model" in key}
    assert texts == ({"lora_te"} if name == "sd" else {"lora_te1", "lora_te2"})
    pipe = fresh(pipeline_of(name))
    pipe.load_lora_weights(str(tmp_path), weight_name="k.safetensors")
    found = image_of(pipe)
    if rslora:  # alpha sqrt(r) / r and alpha / sqrt(r) differ in the last bit
        assert np.allclose(found, expected, atol=1e-5)
    else:
        assert same(found, expected)


def test_kohya_s_form_refuses_what_it_does_not_know(make_task, model_of, tmp_path: Path) -> None:
    moved(make_task("flux", model=model_of("flux"))).save_pretrained(tmp_path)
    with pytest.raises(ExportError, match="transformer"):
        kohya.export(tmp_path, tmp_path / "k.safetensors")
    with pytest.raises(ExportError, match="no plain adapter"):
        kohya.export(tmp_path / "absent", tmp_path / "k.safetensors")
    tensors, _ = adapters.read(tmp_path)
    bare = {name.replace("transformer.", "unet."): value for name, value in tensors.items()}
    with pytest.raises(ExportError, match="alpha"):
        kohya.convert(bare, {})


@pytest.mark.parametrize("lora", [{"type": "lokr"}, {"type": "loha"}, {"dora": True}], ids=["lokr", "loha", "dora"])
def test_other_adapters_are_saved_as_peft_directories(
    lora: Any, make_task, model_of, fresh, image_of, pipeline_of, tmp_path: Path
) -> None:
    """diffusers' pipelines leave DoRA's magnitudes out and know no LoHa, so these load with PEFT."""
    task = moved(make_task("sd", model=model_of("sd", lora={"rank": 4, "alpha": 6, **lora})), 0.1)
    task.save_pretrained(tmp_path)
    assert not (tmp_path / adapters.FILE).exists()
    expected = image_of(task.pipe)
    pipe = fresh(pipeline_of("sd"))
    assert not same(image_of(pipe), expected)
    PeftModel.from_pretrained(pipe.unet, str(tmp_path / "unet"))  # puts the adapter into the UNet itself
    assert same(image_of(pipe), expected)
    again = make_task("sd", tmp_path, model=model_of("sd", lora={"rank": 4, "alpha": 6, **lora})).eval()
    assert same(image_of(again.pipe), expected)


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
def test_a_saved_adapter_goes_on_as_it_was(name: str, make_task, model_of, tmp_path: Path) -> None:
    model = model_of(name, text_encoder_lora=TEXT)
    task = moved(make_task(name, model=model))
    task.save_pretrained(tmp_path)
    again = dict(make_task(name, tmp_path, model=model).named_parameters())
    for key, parameter in task.named_parameters():
        assert torch.equal(again[key], parameter), key


def test_another_adapter_is_refused(make_task, model_of, tmp_path: Path) -> None:
    make_task("sd", model=model_of("sd")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not the recipe's"):
        make_task("sd", tmp_path, model=model_of("sd", lora={"rank": 2}))
    with pytest.raises(ModelError, match="not the recipe's"):
        make_task("sd", tmp_path, model=model_of("sd", lora={"rank": 4, "target_modules": ["to_q"]}))
    with pytest.raises(ModelError, match="no adapter can be read"):
        make_task("sd", tmp_path / "absent", model=model_of("sd"))


def test_what_it_belongs_to_is_named(make_task, model_of, tmp_path: Path) -> None:
    make_task("sd", model=model_of("sd")).save_pretrained(tmp_path)
    base = json.loads((tmp_path / "base_model.json").read_text())
    assert base["path"] == model_of("sd")["path"]
    assert len(base["unet"]) == 64


# ---------------------------------------------------------------------------------------------- the denoiser itself


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_a_denoiser_trained_whole_is_a_pipeline(
    name: str, make_task, model_of, fresh, image_of, pipeline_of, tmp_path: Path
) -> None:
    model = model_of(name, lora=None)
    task = moved(make_task(name, model=model), 0.02)
    task.save_pretrained(tmp_path)
    expected = image_of(task.pipe)
    assert same(image_of(fresh(str(tmp_path))), expected)
    assert not same(image_of(fresh(pipeline_of(name))), expected)
    assert same(image_of(make_task(name, tmp_path, model=model).eval().pipe), expected)


# ---------------------------------------------------------------------------------------------- new words


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 10}], ids=["alone", "pivotal"])
def test_new_words_load_with_diffusers(
    lora: Any, make_task, model_of, fresh, image_of, pipeline_of, tmp_path: Path
) -> None:
    tokens = [{"token": "<sks>", "start": "d", "vectors": 2}, {"token": "<other>", "start": "ca"}]
    model = model_of("sd", lora=lora, freeze_denoiser=lora is None, new_tokens=tokens)
    task = moved(make_task("sd", model=model), 0.5)
    task.save_pretrained(tmp_path)
    prompt = "a <sks> and <other>"
    expected = image_of(task.pipe, prompt)
    pipe = fresh(pipeline_of("sd"))
    assert not same(image_of(pipe, prompt), expected)
    for token in ("<sks>", "<other>"):
        pipe.load_textual_inversion(str(tmp_path / "embeddings" / f"{token}.safetensors"))
    if lora is not None:
        pipe.load_lora_weights(str(tmp_path))
    assert same(image_of(pipe, prompt), expected)
    again = make_task("sd", tmp_path, model=model).eval()
    assert same(image_of(again.pipe, prompt), expected)


def test_new_words_of_sdxl_have_a_row_in_both_encoders(
    make_task, model_of, fresh, image_of, pipeline_of, tmp_path: Path
) -> None:
    tokens = [{"token": "<sks>", "start": "dog", "vectors": 2}]
    task = moved(make_task("sdxl", model=model_of("sdxl", lora=None, freeze_denoiser=True, new_tokens=tokens)), 0.5)
    task.save_pretrained(tmp_path)
    expected = image_of(task.pipe, "a <sks>")
    saved = load_file(tmp_path / "embeddings" / "<sks>.safetensors")
    pipe = fresh(pipeline_of("sdxl"))
    for key, number in (("clip_l", ""), ("clip_g", "_2")):
        encoder, words = getattr(pipe, f"text_encoder{number}"), getattr(pipe, f"tokenizer{number}")
        pipe.load_textual_inversion(saved[key], token="<sks>", text_encoder=encoder, tokenizer=words)
    assert same(image_of(pipe, "a <sks>"), expected)


def test_only_new_rows_are_trained_and_they_begin_as_the_start_word(make_task, batch_of, model_of, folder) -> None:
    tokens = [{"token": "<sks>", "start": "ab", "vectors": 3}]
    task = make_task(
        "sd", model=model_of("sd", lora=None, freeze_denoiser=True, new_tokens=tokens),
        data={"train": str(folder), "captions": {"prefix": "<sks> "}},
    )  # fmt: skip
    trained = {name: value for name, value in task.named_parameters() if value.requires_grad}
    assert [tuple(value.shape) for value in trained.values()] == [(3, 32)]
    table, (rows,) = task.pipe.text_encoder.get_input_embeddings(), trained.values()
    ids = task.pipe.tokenizer("ab", add_special_tokens=False).input_ids
    assert torch.equal(rows, table.base.weight[torch.tensor([ids[0], ids[1], ids[0]])])
    task.train_mode()
    task.loss(batch_of(task)).sum.backward()
    assert rows.grad.abs().sum(1).gt(0).all(), "each row is in the captions"
    assert table.base.weight.grad is None


def test_words_that_are_known_or_empty_are_refused(make_task, model_of) -> None:
    tokens = [{"token": "<|endoftext|>", "start": "a"}]
    with pytest.raises(ModelError, match="knows this word"):
        make_task("sd", model=model_of("sd", new_tokens=tokens))


# ---------------------------------------------------------------------------------------------- several, and merged


def test_several_adapters_with_weights_are_merged(
    make_task, model_of, fresh, image_of, pipeline_of, tmp_path: Path
) -> None:
    folders = []
    for number, rank in enumerate((2, 4)):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        lora = {"rank": rank, "alpha": 3.0}
        moved(
            make_task("sd", model=model_of("sd", lora=lora, text_encoder_lora=TEXT)), 0.2 + number / 10
        ).save_pretrained(folders[-1])
    merge(pipeline_of("sd"), [(folders[0], 0.5), (folders[1], 1.0)], tmp_path / "merged")
    pipe = fresh(pipeline_of("sd"))
    for number, folder in enumerate(folders):
        pipe.load_lora_weights(str(folder), adapter_name=str(number))
    pipe.set_adapters(["0", "1"], [0.5, 1.0])
    expected, merged = image_of(pipe), image_of(fresh(str(tmp_path / "merged")))
    assert np.allclose(merged, expected, atol=1e-3), "W x + s B A x and (W + s B A) x differ by rounding"
    assert not np.allclose(merged, image_of(fresh(pipeline_of("sd"))), atol=1e-2)
    with pytest.raises(ExportError, match="not empty"):
        merge(pipeline_of("sd"), [(folders[0], 1.0)], tmp_path / "merged")
    with pytest.raises(ExportError, match="no adapter"):
        merge(pipeline_of("sd"), [(tmp_path / "nothing", 1.0)], tmp_path / "other")


def test_switched_off_the_model_is_the_base(make_task, model_of, fresh, image_of, pipeline_of) -> None:
    task = moved(make_task("sd", model=model_of("sd", text_encoder_lora=TEXT)))
    changed = image_of(task.pipe)
    with adapters.switched_off(task.parts.with_adapters()):
        assert same(image_of(task.pipe), image_of(fresh(pipeline_of("sd"))))
    assert same(image_of(task.pipe), changed)
    assert all(value.requires_grad for name, value in task.named_parameters() if ".lora_" in name)


def test_an_adapter_without_its_alpha_is_told(make_task, model_of, tmp_path: Path) -> None:
    """As other programs have written them: the file then says nothing of alpha, and kohya's form can't be made."""
    make_task("sd", model=model_of("sd")).save_pretrained(tmp_path)
    tensors, _ = adapters.read(tmp_path)
    save_file(tensors, tmp_path / adapters.FILE)
    with pytest.raises(ExportError, match="lora_alpha"):
        kohya.export(tmp_path, tmp_path / "k.safetensors")
