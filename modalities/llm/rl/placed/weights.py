"""What a placed engine has to know of the trainer's model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from .....common.errors import ModelError
from ...reference import ADAPTER as REFERENCE


def packed(model: nn.Module) -> dict[str, np.ndarray]:
    """The bytes of all that a training changes, by name; NumPy's arrays, as Ray shares them without copies."""
    return {name: _bytes(value) for name, value in _trained(model).items()}


@torch.no_grad()
def unpack(weights: Mapping[str, np.ndarray], model: nn.Module) -> None:
    """Give a model what `packed` took from another one.

    Raises:
        ModelError: the models are not the same.
    """
    own = _trained(model)
    other = sorted(own.keys() ^ weights.keys())
    other += [name for name in own.keys() & weights.keys() if own[name].nbytes != weights[name].nbytes]
    if other:
        raise ModelError("the engine's model is not the trainer's", where="rollout.placement.engines", given=other[:3])
    for name, value in own.items():
        value.copy_(torch.from_numpy(weights[name].copy()).view(value.dtype).view(value.shape))


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the parameters that are not trained, which are never handed over."""
    whole = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad and f".{REFERENCE}." not in name:
            whole.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            whole.update(_bytes(parameter).tobytes())
    return whole.hexdigest()


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Parameters with gradient, and buffers that are saved."""
    found = {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    return found


def _bytes(value: Tensor) -> np.ndarray:
    plain = value.detach().cpu().contiguous().view(-1)
    return np.asarray(plain.view(torch.uint8).numpy())
