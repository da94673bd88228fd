"""A dry run: a training step of a hollow model, operation by operation, with nothing computed. What is counted is what
the operations would allocate and compute."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
Phase = Literal["forward", "backward"]

ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
"""torch's counter does not know them."""


class Dry(TorchDispatchMode):
    """Counts bytes that are alive and floating-point operations while a hollow model runs.

    What a hollow tensor holds is not known. Where the code asks, it is told what an ordinary step would find: a truth
    is false, a number 1, two tensors are equal.

    Args:
        before: tensors that are there before, and are not counted.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()):
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.phase: Phase = "forward"
        self.flops: Counter[str] = Counter()
        self._sizes: dict[int, tuple[int, Any]] = {}
        self._before = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            if func is aten._local_scalar_dense.default:
                return _told(args[0].dtype)
            if func in (aten.equal.default, aten.allclose.default):
                return True
            if func is aten.nonzero.default:
                return torch.stack(torch.meshgrid(*map(torch.arange, args[0].shape), indexing="ij"), -1).flatten(0, -2)
            if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
                args = (args[0], _places(args[1]), *args[2:])
        out = _ctc(*args) if func is aten._ctc_loss.Tensor else func(*args, **kwargs)
        self._compute(func, args, kwargs, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._allocate(tensor)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = func.overloadpacket
        if packet in ATTENTION:
            is_backward = packet is ATTENTION[1]
            query, key, value = args[1:4] if is_backward else args[:3]
            batch, heads, length, width = query.shape
            products = 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])
            self.flops[self.phase] += products * 5 // 2 if is_backward else products
        elif packet in flop_registry:
            self.flops[self.phase] += flop_registry[packet](*args, **kwargs, out_val=out)

    def _allocate(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse
            return
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or key in self._before or size == 0:
            return
        self._sizes[key] = size, weakref.ref(storage, partial(self._free, key))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, _: Any) -> None:
        self.live -= self._sizes.pop(key)[0]


def _told(dtype: torch.dtype) -> bool | int | float:
    return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _ctc(log_probs: torch.Tensor, _targets: Any, _frames: Any, labels: torch.Tensor, *_: Any) -> Any:
    """What the CTC loss of [T, B, V] gives: the loss [B] and its table [B, T, 2 L + 1], of the longest labels L."""
    frames, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, 2 * int(labels.max()) + 1)


def _places(indices: Any) -> list[Any]:
    """Masks that are known as the places they choose: how many these are decides a shape."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            found += list(index.nonzero(as_tuple=True))
        else:
            found.append(index)
    return found
