"""A small Stable Diffusion pipeline from a configuration: its VAE trained here on drawn shapes, its text encoder as
drawn at random (a few words need no more), its denoiser untrained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .drawn import draw, drawings

WIDTH = 64
"""Width of text embeddings."""
LATENT = 8
"""Channels of the latents, each of 8 x 8."""


def make_pipeline(
    folder: Path, texts: Iterable[str], seed: int = 0, steps: int = 500, told: Callable[[int, int], None] | None = None
) -> None:
    """Write the pipeline as `from_pretrained(folder)` loads it.

    Args:
        folder: where to.
        texts: what the tokenizer learns its words from.
        seed: fixes weights and training.
        steps: training steps of the VAE.
        told: called with (steps done, steps).
    """
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        words = make_tokenizer(texts)
        vae = trained_vae(seed, steps, told)
        text, unet = _text_encoder(words), _unet()
    # The last step is noise alone, as sampling begins: else even backgrounds, which little noise hides, come out wrong
    # (Lin et al., arXiv:2305.08891).
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing",
    )  # fmt: skip
    pipe: Any = StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=words, unet=unet, scheduler=scheduler, safety_checker=None,
        feature_extractor=None, image_encoder=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.save_pretrained(folder)


def make_tokenizer(texts: Iterable[str]) -> Any:
    """A CLIP tokenizer that holds each word of the texts as one piece; others are spelled in bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=letters, end_of_word_suffix="</w>", show_progress=False
    )
    learner.train_from_iterator(list(texts), trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = dict.fromkeys([*letters, *(f"{letter}</w>" for letter in letters), *learned["vocab"]])
    vocab = {piece: number for number, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    merges: Any = [tuple(merge) for merge in learned["merges"]]
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def _text_encoder(words: Any) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        initializer_range=0.2,
        initializer_factor=10.0,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    return CLIPTextModel(config)


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=LATENT,
        out_channels=LATENT,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=16,
    )


def pictures(number: int, rng: np.random.Generator) -> Tensor:
    """Drawn shapes of both styles in [-1, 1], float32 [number, 3, 32, 32]."""
    known = [*drawings(), *drawings("pastel")]
    drawn = [np.asarray(draw(known[i], rng)) for i in rng.integers(len(known), size=number)]
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).float() / 127.5 - 1


def trained_vae(seed: int, steps: int, told: Callable[[int, int], None] | None = None, batch: int = 16) -> Any:
    """An autoencoder of drawn shapes, its latents scaled to a standard deviation of 1.

    It learns to reproduce the pictures (mean absolute and squared error), with a little weight on the latents'
    divergence from a normal distribution, as the VAE of Stable Diffusion (Rombach et al., arXiv:2112.10752).
    """
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=LATENT,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=32,
    )
    data = pictures(2048, np.random.default_rng(seed))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(2, steps))
    for step in range(steps):
        part = data[torch.randint(len(data), (batch,))]
        found = vae.encode(part).latent_dist
        said = vae.decode(found.sample()).sample
        loss = (said - part).abs().mean() + (said - part).square().mean() + 1e-5 * found.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if told:
            told(step + 1, steps)
    with torch.no_grad():
        spread = float(vae.encode(data[:512]).latent_dist.mean.std())
    vae.register_to_config(scaling_factor=1 / spread)
    return vae.eval()
