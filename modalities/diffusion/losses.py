"""Losses of denoising, as plain functions. B batch, C channels, H and W of the latents.

Diffusion (Ho et al., DDPM, arXiv:2006.11239): z_t = sqrt(a_t) x + sqrt(1 - a_t) e for clean latents x, noise e and the
schedule's cumulative product a_t; the signal-to-noise ratio is snr_t = a_t / (1 - a_t). Flow matching (Lipman et al.,
arXiv:2210.02747; Esser et al., SD3, arXiv:2403.03206): z_s = (1 - s) x + s e for a level s in [0, 1].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST, MOST = 1e-4, 1e3
"""Bounds of the signal-to-noise ratio where a weight divides by it (`debiased`)."""


def spread(values: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, 1, 1, 1], in the type of `like`."""
    return values.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def diffused(latents: Tensor, noise: Tensor, products: Tensor, times: Tensor) -> Tensor:
    """z_t: noised latents [B, C, H, W].

    Args:
        latents: x [B, C, H, W].
        noise: e [B, C, H, W].
        products: a [number of steps].
        times: step of each picture [B], int.
    """
    product = products[times]
    return spread(product.sqrt(), latents) * latents + spread((1 - product).sqrt(), latents) * noise


def diffusion_target(kind: str, latents: Tensor, noise: Tensor, products: Tensor, times: Tensor) -> Tensor:
    """What the denoiser is to say [B, C, H, W].

    Args:
        kind: `epsilon`: e; `v_prediction`: sqrt(a) e - sqrt(1 - a) x (Salimans and Ho, arXiv:2202.00512);
            `sample`: x.
    """
    if kind == "epsilon":
        return noise
    if kind == "sample":
        return latents
    product = products[times]
    return spread(product.sqrt(), latents) * noise - spread((1 - product).sqrt(), latents) * latents


def flowed(latents: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
    """z_s: latents [B, C, H, W] on the straight line to the noise, at levels s [B]."""
    level = spread(levels, latents)
    return (1 - level) * latents + level * noise


def flow_target(latents: Tensor, noise: Tensor) -> Tensor:
    """The velocity dz/ds = e - x [B, C, H, W]."""
    return noise - latents


def each_mse(predicted: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of each picture [B], in float32.

    Args:
        predicted, target: [B, C, H, W].
        mask: weight of each place [B, 1, H, W]; the mean is over these weights, so that a small masked area counts as
            much as a large one. Nothing masked in: 0.
    """
    squares = (predicted.float() - target.float()).square()
    if mask is None:
        return squares.flatten(1).mean(1)
    weights = mask.float().expand_as(squares).flatten(1)
    return (squares.flatten(1) * weights).sum(1) / weights.sum(1).clamp(min=1e-6)


# ---------------------------------------------------------------------------------------------- weights


def snr(products: Tensor, times: Tensor) -> Tensor:
    """a_t / (1 - a_t) [B]; 0 at the end of a zero-terminal schedule, infinite where there is no noise."""
    product = products[times].float()
    return product / (1 - product)


def min_snr(ratio: Tensor, gamma: float, kind: str) -> Tensor:
    """Min-SNR weights [B] (Hang et al., arXiv:2303.09556): min(snr, gamma) over snr for epsilon, over snr + 1 for v, as
    it is for x. The first is written min(1, gamma / snr), so that snr = 0 (zero-terminal schedules) gives its limit 1
    and not 0 / 0.
    """
    if kind == "epsilon":
        return (gamma / ratio).clamp(max=1.0)
    clipped = ratio.clamp(max=gamma)
    return clipped / (ratio + 1) if kind == "v_prediction" else clipped


def debiased(ratio: Tensor, kind: str) -> Tensor:
    """Debiased estimation [B] (Yu et al., arXiv:2310.08442): 1 / sqrt(snr) for epsilon; for v 1 / (snr + 1), as
    kohya's scripts have it. The ratio is taken within [1e-4, 1e3], so that a zero-terminal schedule has a weight."""
    bounded = ratio.clamp(LEAST, MOST)
    return 1 / (bounded + 1) if kind == "v_prediction" else bounded.rsqrt()


def p2(ratio: Tensor, gamma: float, k: float = 1.0) -> Tensor:
    """P2 weights [B] (Choi et al., arXiv:2204.00227): 1 / (k + snr)^gamma."""
    return (k + ratio) ** -gamma


def sigma_sqrt(levels: Tensor) -> Tensor:
    """1 / s^2 for flow matching [B], as diffusers has it under this name; s is taken as 0.001 at least."""
    return levels.float().clamp(min=1e-3) ** -2


def cosmap(levels: Tensor) -> Tensor:
    """CosMap [B] (Esser et al., arXiv:2403.03206): 2 / (pi (1 - 2 s + 2 s^2))."""
    levels = levels.float()
    return 2 / (math.pi * (1 - 2 * levels + 2 * levels.square()))


def diffusion_weights(name: str, gamma: float, ratio: Tensor, kind: str) -> Tensor:
    """Weight of each picture [B] by the name of a recipe, for diffusion models."""
    if name == "min_snr":
        return min_snr(ratio, gamma, kind)
    if name == "debiased":
        return debiased(ratio, kind)
    return p2(ratio, gamma) if name == "p2" else torch.ones_like(ratio)


def flow_weights(name: str, levels: Tensor) -> Tensor:
    """Weight of each picture [B] by the name of a recipe, for flow matching."""
    if name == "sigma_sqrt":
        return sigma_sqrt(levels)
    return cosmap(levels) if name == "cosmap" else torch.ones_like(levels, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------- prior preservation


def preserved(losses: Tensor, instances: int, weight: float, meaning: str) -> tuple[Tensor, float]:
    """(sum, count) of losses [2 N] of which the first N are the examples' and the others their class images'.

    Args:
        instances: N.
        weight: lambda.
        meaning: `sum`: mean(examples) + lambda mean(class images) (Ruiz et al., DreamBooth, arXiv:2208.12242).
            `mean`: (sum(examples) + lambda sum(class images)) / 2 N, which is half of it.
    """
    total = losses[:instances].sum() + weight * losses[instances:].sum()
    return total, float(instances if meaning == "sum" else len(losses))
