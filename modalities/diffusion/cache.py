"""Tensors on disk, keyed by content: what frozen parts of a model give is computed once, on bounded space."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from ...common.bounded_folder import BoundedFolder
from ...common.errors import ModelError


def rounded(tensor: Tensor) -> Tensor:
    """A tensor as float32 in the precision of the cache, whether it comes from it or is new, so that a resumed run,
    which finds more there, computes the same.

    Raises:
        ModelError: it has values beyond 16-bit floats.
    """
    found = tensor.half()
    if not torch.isfinite(found).all():
        raise ModelError(
            "values that 16-bit floats can't hold", where="data.cache", given=f"up to {float(tensor.abs().max()):.3g}"
        )
    return found.float()


def key(*parts: object) -> str:
    """SHA-256 (hex) of all that decides a value."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class TensorCache(BoundedFolder):
    """A folder of named tensors as 16-bit floats.

    Args:
        folder: made if absent.
        max_bytes: most space of all files.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        super().__init__(folder, max_bytes, ".safetensors")

    def get(self, name: str) -> dict[str, Tensor] | None:
        """The tensors, as float32, or None if they aren't stored or the file is broken."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        data = self.read(name)
        try:
            return None if data is None else {part: tensor.float() for part, tensor in load(data).items()}
        except (SafetensorError, ValueError):
            return None

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors; those of the same key are replaced."""
        from safetensors.torch import save

        halves = {part: tensor.detach().to("cpu", torch.float16).contiguous() for part, tensor in tensors.items()}
        self.write(name, save(halves))
