"""The end of an optimizer step: the gradient's norm, its division by what carried loss, and its clipping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def finish(optimizer: torch.optim.Optimizer, scale: float, clip_norm: float | None, usable: bool) -> tuple[float, bool]:
    """Multiply the gradient by `scale` and clip it; drop it if it isn't usable or not finite.

    Args:
        optimizer: its parameters hold the gradient.
        scale: factor that makes the mean of the sum that was computed.
        clip_norm: largest 2-norm; None: no clipping.
        usable: whether there is something to learn from; the same on every rank.

    Returns:
        (2-norm after scaling and before clipping, whether the update may be made).
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = total_norm(gradients) * scale
    if not usable or not torch.isfinite(norm).item():
        optimizer.zero_grad(set_to_none=True)  # an optimizer leaves parameters without gradient untouched
        return float(norm), False
    clip = 1.0 if clip_norm is None else min(1.0, clip_norm / (float(norm) + 1e-6))
    torch._foreach_mul_(gradients, scale * clip)
    return float(norm), True


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together, as a scalar tensor; of DTensors, over the ranks that hold their parts."""
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            cut = [at for at, placement in enumerate(gradient.placements) if placement.is_shard()]
            by_mesh[gradient.device_mesh, tuple(cut)].append(gradient.to_local())
        else:
            by_mesh[None, ()].append(gradient)
    if not by_mesh:
        return torch.zeros(())
    if by_mesh.keys() == {(None, ())}:
        return _norm(by_mesh[None, ()])
    squares = []
    for (mesh, cut), parts in by_mesh.items():
        square = _norm(parts).square()
        for at in cut:
            torch.distributed.all_reduce(square, group=mesh.get_group(at))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _norm(parts: list[Tensor]) -> Tensor:
    whole: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
    return whole
