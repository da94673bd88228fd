"""Pictures from a pipeline, for looking at: fixed prompts, fixed seeds."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import torch

from .families import Family
from .model import modules, pictured


def sampled(
    pipe: Any,
    family: Family,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int,
    guidance: float,
    width: int,
    height: int,
    negative: str = "",
    pieces: int = 1,
) -> list[Any]:
    """One Pillow image for each prompt, the same for the same seed on any device but for rounding.

    Latents are decoded in float32. The pipeline's scheduler is left as it was.

    Args:
        pipe: of diffusers.
        family: of its model.
        prompts, seeds: of each picture.
        steps: denoising steps.
        guidance: guidance scale.
        width, height: in pixels.
        negative: what is not wanted.
        pieces: pieces of 75 tokens that a prompt may have.
    """
    device = modules(pipe)[family.denoiser].device
    known = inspect.signature(type(pipe).__call__).parameters
    kept = pipe.scheduler
    images = []
    try:
        for prompt, seed in zip(prompts, seeds, strict=True):
            pipe.scheduler = type(kept).from_config(kept.config)
            asked: dict[str, Any] = {"prompt": prompt, "negative_prompt": negative or None}
            if pieces > 1:
                asked = {**family.embedded(family.encode(pipe, [prompt], pieces))}
                if guidance > 1:
                    against = family.embedded(family.encode(pipe, [negative], pieces))
                    asked |= {f"negative_{name}": value for name, value in against.items()}
            asked = {name: value for name, value in asked.items() if name in known}
            latents = pipe(
                **asked,
                num_inference_steps=steps,
                guidance_scale=guidance,
                width=width,
                height=height,
                generator=torch.Generator().manual_seed(seed),
                output_type="latent",
            ).images
            assert device == latents.device
            images += pictured(pipe, family.unpacked(pipe, latents, height, width))
    finally:
        pipe.scheduler = kept
    return images


def png(image: Any) -> bytes:
    """A Pillow image as the bytes of a PNG file."""
    written = BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


def side_by_side(left: Any, right: Any) -> Any:
    """Two Pillow images of one size in one."""
    from PIL import Image

    both = Image.new("RGB", (left.width + right.width, left.height))
    both.paste(left, (0, 0))
    both.paste(right, (left.width, 0))
    return both


def grid(images: Sequence[Any], columns: int) -> Any:
    """Pillow images of one size as a table, row by row."""
    from PIL import Image

    rows = -(-len(images) // columns)
    width, height = images[0].size
    whole = Image.new("RGB", (columns * width, rows * height), "white")
    for at, image in enumerate(images):
        whole.paste(image, (at % columns * width, at // columns * height))
    return whole
