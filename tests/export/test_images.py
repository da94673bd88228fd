"""Image models as diffusers loads them, in a process that does not know us: the same picture."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from luthier.common import reading
from luthier.common.checkpoint import directory
from luthier.common.errors import ExportError
from luthier.common.training.run import train
from luthier.export.run import export
from luthier.export.source import Source
from luthier.export.targets import onnx_unet

pytest.importorskip("diffusers")

DRAW = """
import diffusers
options = {"num_inference_steps": 3, "guidance_scale": 2.0, "height": 16, "width": 16, "output_type": "np"}
pictures = []
for base, *adapter in json.loads(sys.argv[1]):
    pipe = diffusers.DiffusionPipeline.from_pretrained(base)
    if adapter:
        pipe.load_lora_weights(adapter[0], weight_name=adapter[1])
    pipe.set_progress_bar_config(disable=True)
    pictures.append(pipe("a red dot", generator=torch.Generator().manual_seed(0), **options).images[0].tolist())
print(json.dumps(pictures))
"""
GRAPH = """
import diffusers, onnxruntime
folder, merged = sys.argv[1:]
session = onnxruntime.InferenceSession(folder + "/unet/model.onnx")

def said(sample, timestep, encoder_hidden_states, **_):
    times = np.full(len(sample), float(timestep), np.float32)
    given = {"sample": sample.numpy(), "timestep": times, "encoder_hidden_states": encoder_hidden_states.numpy()}
    return (torch.from_numpy(session.run(None, given)[0]),)

unet = diffusers.UNet2DConditionModel
whole = unet.from_pretrained(merged, subfolder="unet")
differences, _ = [], torch.manual_seed(0)
for step, (batch, height, width, tokens) in {1: (1, 8, 8, 77), 500: (2, 16, 2, 9), 999: (3, 4, 10, 5)}.items():
    noise, text = torch.randn(batch, 4, height, width), torch.randn(batch, tokens, 32)
    with torch.no_grad():
        expected = whole(noise, step, text).sample
    differences.append([float((said(noise, step, text)[0] - expected).abs().max()), float(expected.abs().max())])
# The pipeline of the artifact alone, with a UNet whose own weights are random and of no use.
empty = unet.from_config(unet.load_config(folder, subfolder="unet"))
empty.forward = said
pipe = diffusers.DiffusionPipeline.from_pretrained(folder, unet=empty)
pipe.set_progress_bar_config(disable=True)
options = {"num_inference_steps": 3, "guidance_scale": 2.0, "height": 16, "width": 16, "output_type": "np"}
picture = pipe("a red dot", generator=torch.Generator().manual_seed(0), **options).images[0]
print(json.dumps([differences, picture.tolist()]))
"""
LORA = {"rank": 4, "alpha": 10}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Stable Diffusion with random weights."""
    import diffusers as df
    import transformers as hf
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    words = hf.CLIPTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], model_max_length=77)
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(7)
    pipe = df.StableDiffusionPipeline(
        vae=df.AutoencoderKL(
            block_out_channels=(16, 16), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=8,
            up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4,
        ),
        text_encoder=hf.CLIPTextModel(hf.CLIPTextConfig(vocab_size=len(words), **sizes, **ids)), tokenizer=words,
        unet=df.UNet2DConditionModel(
            sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=32,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        scheduler=df.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
                                   clip_sample=False, steps_offset=1),
        safety_checker=None, feature_extractor=None, image_encoder=None, requires_safety_checker=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("pipeline")
    pipe.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def trained(pipeline: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`trained(model section)`: the checkpoint of a training of 4 steps on 4 pictures."""
    from PIL import Image

    def make(**model: Any) -> Path:
        folder = tmp_path_factory.mktemp("run")
        (folder / "pictures").mkdir()
        rows = []
        for number, caption in enumerate(("a red dot", "a green line", "rain", "a big ship")):
            values = np.random.default_rng(number).integers(0, 255, (2, 2, 3), dtype=np.uint8)
            Image.fromarray(values).resize((16, 16), Image.Resampling.BILINEAR).save(folder / f"pictures/{number}.png")
            rows.append(json.dumps({"file_name": f"{number}.png", "text": caption}) + "\n")
        (folder / "pictures/metadata.jsonl").write_text("".join(rows))
        tree = {
            "task": {"kind": "diffusion.text_to_image"}, "model": {"path": pipeline, **model},
            "data": {"train": str(folder / "pictures"), "validation": str(folder / "pictures"), "workers": 0,
                     "image": {"resolution": 16, "step": 4, "min_side": 4}, "batch": {"examples": 4}},
            "optim": {"learning_rate": 3e-2, "warmup": 0, "schedule": "constant"},
            "train": {"steps": 4, "accelerator": "cpu", "threads": 1}, "checkpoint": {"every": None},
            "output": str(folder / "run"),
        }  # fmt: skip
        return directory.committed(train(reading.build(tree, "test.yaml")).folder / "checkpoints")[-1]

    return make


@pytest.fixture(scope="module")
def adapted(trained) -> Path:
    return trained(lora=LORA, text_encoder_lora=LORA)


def pictures(outside: Any, *jobs: tuple[object, ...]) -> list[np.ndarray]:
    """What diffusers draws with (pipeline,) or (pipeline, folder of an adapter, its file), all in one process."""
    return [np.array(one) for one in outside(DRAW, json.dumps([[str(word) for word in job] for job in jobs]))]


@pytest.fixture(scope="module")
def places(adapted: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`places(format)`: the artifact, made once, and its parity report."""

    @cache
    def make(format: str) -> tuple[Path, dict[str, Any]]:
        place = export(adapted, format, tmp_path_factory.mktemp("artifact") / format, inputs=2)
        return place, json.loads((place / "parity.json").read_text())

    return make


@pytest.mark.parametrize("format", ["diffusers", "kohya", "merged"])
def test_the_artifact_draws_what_the_trained_model_draws(format: str, places) -> None:
    """The adapter, in either form, bit for bit; merged into the weights, up to rounding."""
    place, report = places(format)
    assert report["usable"]
    assert report["inputs"] == 2
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], rel=1e-4)
    if format != "merged":
        assert report["largest_difference"] == 0.0
    if format == "diffusers":
        with safe_open(str(place / "pytorch_lora_weights.safetensors"), "pt") as file:
            settings = json.loads(file.metadata()["lora_adapter_metadata"])
        assert settings["unet.lora_alpha"] == settings["text_encoder.lora_alpha"] == 10


@pytest.mark.slow
@pytest.mark.serves("merged", "diffusion.text_to_image", "diffusers")
@pytest.mark.serves("diffusers", "diffusion.text_to_image", "diffusers")
@pytest.mark.serves("kohya", "diffusion.text_to_image", "diffusers")
def test_diffusers_alone_draws_the_same(places, pipeline: str, outside) -> None:
    adapter, kohya, merged, base = pictures(
        outside,
        (pipeline, places("diffusers")[0], "pytorch_lora_weights.safetensors"),
        (pipeline, places("kohya")[0], "adapter.safetensors"),
        (places("merged")[0],),
        (pipeline,),
    )
    np.testing.assert_array_equal(kohya, adapter)
    np.testing.assert_allclose(merged, adapter, atol=1e-3)
    assert np.abs(base - adapter).max() > 0.01, "the adapter does something"


@pytest.mark.slow
@pytest.mark.serves("onnx", "diffusion.text_to_image", "onnxruntime")
def test_the_graph_of_the_unet_draws_the_same(places, pipeline: str, outside) -> None:
    """The noise for latents and texts of other sizes than the graph was made with, and the picture."""
    place, report = places("onnx")
    assert report["usable"]
    assert 0 < report["largest_difference"] <= report["allowed_difference"]
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], rel=1e-4)
    assert not list((place / "unet").glob("*.safetensors")), "the weights are in the graph"
    merged = places("merged")[0]
    differences, picture = outside(GRAPH, place, merged)
    for largest, scale in differences:
        assert largest < 2**-13 * scale
    expected, base = pictures(outside, (merged,), (pipeline,))
    np.testing.assert_allclose(picture, expected, atol=1e-3)
    assert np.abs(base - picture).max() > 0.01, "the adapter does something"


@pytest.mark.slow
def test_the_graph_of_a_unet_of_sdxl_takes_pooled_text_and_sizes(tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=32,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24 + 6 * 8,
    ).eval()  # fmt: skip
    onnx_unet.write_unet(unet, tmp_path / "model.onnx")
    served = onnx_unet.Served(tmp_path / "model.onnx")
    given = (torch.randn(3, 4, 4, 10), torch.tensor(7), torch.randn(3, 9, 32))
    added = {"text_embeds": torch.randn(3, 24), "time_ids": torch.randint(0, 1024, (3, 6)).float()}
    other = {**added, "time_ids": added["time_ids"] + 100}
    with torch.no_grad():
        expected, changed = (unet(*given, added_cond_kwargs=one).sample for one in (added, other))
    largest = (served(*given, added).sample - expected).abs().max()
    assert largest < 2**-13 * expected.abs().max()
    assert (changed - expected).abs().max() > 10 * largest, "the sizes matter"


def test_only_a_unet_is_written_as_a_graph(tmp_path: Path) -> None:
    flux = SimpleNamespace(pipe=SimpleNamespace(components={"transformer": None}))
    exportable: Any = SimpleNamespace(load=lambda directory: flux)
    with pytest.raises(ExportError, match="UNet"):
        onnx_unet.write(Source(exportable, tmp_path, tmp_path), tmp_path / "out", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"dora": True}, {"type": "lokr"}, {"type": "loha"}])
def test_adapters_that_diffusers_does_not_load_are_merged(lora: Any, trained, pipeline, outside, tmp_path) -> None:
    place = export(trained(lora={**LORA, **lora}), "merged", tmp_path / "out", inputs=2)
    assert json.loads((place / "parity.json").read_text())["usable"]
    drawn, base = pictures(outside, (place,), (pipeline,))
    assert np.abs(drawn - base).max() > 1e-3


@pytest.mark.slow
def test_a_pipeline_that_was_trained_whole(trained, outside, tmp_path: Path) -> None:
    checkpoint = trained()
    place = export(checkpoint, "merged", tmp_path / "out", inputs=2)
    report = json.loads((place / "parity.json").read_text())
    assert report["usable"]
    np.testing.assert_array_equal(*pictures(outside, (place,), (checkpoint / "model",)))
    small = export(checkpoint, "merged", tmp_path / "small", dtype="float16", inputs=2)
    assert json.loads((small / "parity.json").read_text())["largest_difference"] > 0
    with pytest.raises(ExportError, match="no adapter"):
        export(checkpoint, "diffusers", tmp_path / "none", inputs=1)


@pytest.mark.slow
def test_new_words_lie_beside_the_adapter(trained, tmp_path: Path) -> None:
    words = [{"token": "<sks>", "start": "d", "vectors": 2}]
    checkpoint = trained(lora=LORA, new_tokens=words)
    for format in ("diffusers", "kohya"):
        place = export(checkpoint, format, tmp_path / format, inputs=2)
        assert json.loads((place / "parity.json").read_text())["usable"]
        assert (place / "embeddings" / "<sks>.safetensors").is_file()
    with pytest.raises(ExportError, match="new words"):
        export(checkpoint, "merged", tmp_path / "merged", inputs=1)
