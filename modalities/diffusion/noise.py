"""Noise that is added to latents [B, C, H, W]. What is drawn comes from torch's global generator, or a given one."""

from __future__ import annotations

import torch
from torch import Tensor

from .sections import NoiseSection


def drawn(latents: Tensor, section: NoiseSection) -> Tensor:
    """Noise for latents as a recipe asks."""
    noise = torch.randn(latents.shape, dtype=latents.dtype, device=latents.device)
    if section.offset:
        noise = offset(noise, section.offset)
    if section.multires:
        noise = multires(noise, section.multires, section.multires_discount)
    return noise


def offset(noise: Tensor, size: float) -> Tensor:
    """Noise with one more value for each picture and channel (offset noise, N. Guttenberg, "Diffusion with offset
    noise", 2023), so that the mean brightness is learned too."""
    batch, channels = noise.shape[:2]
    return noise + size * torch.randn(batch, channels, 1, 1, dtype=noise.dtype, device=noise.device)


def multires(noise: Tensor, number: int, discount: float) -> Tensor:
    """Noise with coarser noises added, each 2 to 4 times coarser than the one before and `discount` times its size,
    brought back to a standard deviation of 1 ("Multi-resolution noise for diffusion model training", J. Whitaker,
    2023; the pyramid of kohya's scripts).

    Args:
        noise: [B, C, H, W].
        number: most coarser noises; it ends where one is a single value.
        discount: size relative to the one before.
    """
    batch, channels, height, width = noise.shape
    for level in range(1, number + 1):
        ratio = float(torch.rand([])) * 2 + 2
        rows, columns = max(1, int(height / ratio**level)), max(1, int(width / ratio**level))
        coarse = torch.randn(batch, channels, rows, columns, dtype=noise.dtype, device=noise.device)
        fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
        noise = noise + fine * discount**level
        if rows == columns == 1:
            break
    return noise / noise.std()


def perturbed(noise: Tensor, size: float) -> Tensor:
    """The noise that makes the input, where the target keeps `noise` (input perturbation, Ning et al.,
    arXiv:2301.11706)."""
    return noise + size * torch.randn_like(noise) if size else noise


def fixed(shape: tuple[int, ...], seed: int) -> Tensor:
    """Noise that depends on the seed alone, on every device, for evaluation."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
