"""Texts of all ranks as one batch, with the gradient of it."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.nn import functional


def ranks() -> int:
    """Number of processes."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gathered(tensor: Tensor, fill: float = 0) -> Tensor:
    """[M, ...] of every rank, one after the other: [sum of M, ...].

    The gradient of a rank's part is the sum of what all ranks' losses ask of it, so that the sum of the ranks' losses
    has the gradient that it would have on one.

    Args:
        tensor: of this rank; sizes may differ from rank to rank in the first two dimensions.
        fill: what the second dimension is filled up with.
    """
    if ranks() == 1:
        return tensor
    sizes = _sizes(tensor)
    longest = [max(size[axis] for size in sizes) for axis in range(len(sizes[0]))]
    pad = [longest[axis] - tensor.shape[axis] for axis in range(len(longest))]
    padding = [0, 0] * (tensor.dim() - len(pad)) + [part for amount in reversed(pad) for part in (0, amount)]
    padded = functional.pad(tensor, padding, value=fill).contiguous()
    parts = _AllGather.apply(padded) if tensor.is_floating_point() else _all(padded)
    return torch.cat([part[: size[0]] for part, size in zip(parts, sizes, strict=True)])


def _sizes(tensor: Tensor) -> list[list[int]]:
    own = torch.tensor(tensor.shape[:2], device=tensor.device)
    return [part.tolist() for part in _all(own)]


def _all(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(ranks())]
    distributed.all_gather(parts, tensor)
    return parts


class _AllGather(torch.autograd.Function):
    """Backward: the sum over ranks of the gradients of this rank's part."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(_all(tensor))

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        together = torch.stack([gradient.contiguous() for gradient in gradients])
        distributed.all_reduce(together)
        return together[distributed.get_rank()]
