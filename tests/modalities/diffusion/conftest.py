"""Tiny pipelines from configurations (as in howto/sd_lora_tiny.py and flow_lora_tiny.py), drawn pictures, and shortcuts
to build what is tested. Test files can't import from each other, so shared functions are fixtures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

pytest.importorskip("diffusers")

import diffusers as df
import transformers as hf
from PIL import Image

from luthier.common.data.collect import collect
from luthier.common.reading import build
from luthier.modalities.diffusion.model import facts, load
from luthier.modalities.diffusion.sampling import sampled

SEED = 7
CLIP_WIDTH = 32


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokenizer() -> hf.CLIPTokenizer:
    """Bytes without merges: a letter is a token."""
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return hf.CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def clip(kind: type, words: hf.CLIPTokenizer) -> Any:
    config = hf.CLIPTextConfig(
        vocab_size=len(words), hidden_size=CLIP_WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, projection_dim=CLIP_WIDTH, bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    return kind(config)


def t5(words: hf.CLIPTokenizer) -> Any:
    return hf.T5EncoderModel(
        hf.T5Config(vocab_size=len(words), d_model=CLIP_WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    )


def vae(channels: int, shift: float | None = None) -> df.AutoencoderKL:
    """Pixels to latents of half their sides."""
    return df.AutoencoderKL(
        block_out_channels=(16, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=channels, norm_num_groups=8,
        shift_factor=shift,
    )  # fmt: skip


def unet(width: int, **more: Any) -> df.UNet2DConditionModel:
    return df.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=width, **more,
    )  # fmt: skip


def stable_diffusion(**schedule: Any) -> Any:
    words = tokenizer()
    scheduler = df.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1, **schedule
    )
    return df.StableDiffusionPipeline(
        vae=vae(4), text_encoder=clip(hf.CLIPTextModel, words), tokenizer=words, unet=unet(CLIP_WIDTH),
        scheduler=scheduler, safety_checker=None, feature_extractor=None, image_encoder=None,
        requires_safety_checker=False,
    )  # fmt: skip


def sdxl() -> Any:
    words = tokenizer()
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    more |= {"projection_class_embeddings_input_dim": CLIP_WIDTH + 6 * 8}
    return df.StableDiffusionXLPipeline(
        vae=vae(4), text_encoder=clip(hf.CLIPTextModel, words), tokenizer=words,
        text_encoder_2=clip(hf.CLIPTextModelWithProjection, words), tokenizer_2=tokenizer(),
        unet=unet(2 * CLIP_WIDTH, **more), add_watermarker=False,
        scheduler=df.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
    )  # fmt: skip


def sd3() -> Any:
    words = tokenizer()
    two = [clip(hf.CLIPTextModelWithProjection, words) for _ in range(2)]
    transformer = df.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=2 * CLIP_WIDTH, caption_projection_dim=32, pooled_projection_dim=2 * CLIP_WIDTH,
        out_channels=16,
    )  # fmt: skip
    encoder = hf.T5EncoderModel(
        hf.T5Config(vocab_size=len(words), d_model=2 * CLIP_WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    )
    return df.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=df.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae(16, 0.1),
        text_encoder=two[0], tokenizer=words, text_encoder_2=two[1], tokenizer_2=tokenizer(), text_encoder_3=encoder,
        tokenizer_3=tokenizer(),
    )  # fmt: skip


def flux() -> Any:
    words = tokenizer()
    transformer = df.FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=CLIP_WIDTH, pooled_projection_dim=CLIP_WIDTH, guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    return df.FluxPipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae(16, 0.1),
        text_encoder=clip(hf.CLIPTextModel, words), tokenizer=words, text_encoder_2=t5(words),
        tokenizer_2=tokenizer(), transformer=transformer,
    )  # fmt: skip


MAKERS: dict[str, Callable[[], Any]] = {
    "sd": stable_diffusion, "v": lambda: stable_diffusion(prediction_type="v_prediction"),
    "zero": lambda: stable_diffusion(rescale_betas_zero_snr=True), "sdxl": sdxl, "sd3": sd3, "flux": flux,
}  # fmt: skip


@pytest.fixture(scope="session")
def pipeline_of(tmp_path_factory) -> Callable[[str], str]:
    """`pipeline_of("sd")`: the directory of a tiny pipeline: sd, v (v-prediction), zero (zero-terminal), sdxl, ..."""
    made: dict[str, str] = {}

    def of(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp("pipelines") / name
            torch.manual_seed(SEED)
            MAKERS[name]().save_pretrained(folder)
            made[name] = str(folder)
        return made[name]

    return of


# ---------------------------------------------------------------------------------------------- pictures

CAPTIONS = ("a red dot", "a green line", "a dog", "two cats, grey", "a blue house", "an old tree", "rain", "a big ship")


def painted(number: int, width: int = 16, height: int = 16) -> Image.Image:
    """A smooth picture with its own colours."""
    rng = np.random.default_rng(number)
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    ends = rng.uniform(0, 255, (3, 3))
    values = ends[0] + across[..., None] * (ends[1] - ends[0]) + down[..., None] * (ends[2] - ends[0]) / 2
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def paint() -> Callable[..., Image.Image]:
    return painted


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """8 square pictures with `metadata.jsonl`."""
    place = tmp_path_factory.mktemp("pictures")
    rows = []
    for number, caption in enumerate(CAPTIONS):
        painted(number).save(place / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": caption, "kind": "ab"[number % 2]})
    (place / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return place


# ---------------------------------------------------------------------------------------------- shortcuts


@pytest.fixture(scope="session")
def make_recipe(pipeline_of, folder, tmp_path_factory) -> Callable[..., Any]:
    """`make_recipe("sd", **sections)`: a validated recipe; sections are merged into small defaults."""
    output = tmp_path_factory.mktemp("output")

    def make(name: str, /, **sections: Any) -> Any:
        tree: dict[str, Any] = {
            "task": {"kind": "diffusion.text_to_image"},
            "model": {"path": pipeline_of(name) if name in MAKERS else name, "lora": {"rank": 4, "alpha": 8}},
            "data": {"train": str(folder), "workers": 0, "image": {"resolution": 16, "step": 4, "min_side": 4},
                     "batch": {"examples": 4}},
            "optim": {"learning_rate": 1e-2, "warmup": 0, "schedule": "constant"},
            "train": {"steps": 2, "accelerator": "cpu", "threads": 1, "log_every": 1},
            "output": str(output),
        }  # fmt: skip
        for section, values in sections.items():
            tree[section] = tree[section] | values if isinstance(tree.get(section), dict) else values
        return build(tree, "test")

    return make


@pytest.fixture(scope="session")
def make_task(make_recipe) -> Callable[..., Any]:
    """`make_task("sd", weights=None, **sections)`: the task of such a recipe."""
    from luthier.modalities.diffusion.text_to_image.task import Task

    def make(name: str, /, weights: Path | None = None, **sections: Any) -> Task:
        return Task(make_recipe(name, **sections), weights)

    return make


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Any]:
    """`batch_of(task, number, seed)`: a collated batch of the first examples of its recipe."""

    def of(task: Any, number: int = 4, seed: int | None = 0) -> Any:
        processing = task.processing
        examples = collect(processing.recipe.data.train, processing, processing.recipe.data).examples[:number]
        generator = None if seed is None else np.random.default_rng(seed)
        return processing.collate([processing.encode(example, generator) for example in examples], generator)

    return of


@pytest.fixture(scope="session")
def image_of() -> Callable[..., np.ndarray]:
    """`image_of(pipe)`: what a pipeline draws for a fixed prompt and seed, as numbers in [0, 1]."""

    def of(pipe: Any, prompt: str = "a red dot", **more: Any) -> np.ndarray:
        pipe.set_progress_bar_config(disable=True)
        options = {"num_inference_steps": 2, "guidance_scale": 2.0, "height": 16, "width": 16, "output_type": "np"}
        pictures = pipe(prompt, generator=torch.Generator().manual_seed(0), **options | more).images
        return np.asarray(pictures)

    return of


@pytest.fixture(scope="session")
def fresh() -> Callable[[str], Any]:
    """`fresh(path)`: a pipeline as diffusers loads it."""
    return lambda path: df.DiffusionPipeline.from_pretrained(path)


@pytest.fixture(scope="session")
def drawn_by() -> Callable[..., Any]:
    """`drawn_by(path, prompt)`: a Pillow image by our own sampling."""

    def by(path: str, prompt: str) -> Any:
        known = facts(path)
        return sampled(load(known), known.family, [prompt], [0], steps=2, guidance=2.0, width=16, height=16)[0]

    return by
