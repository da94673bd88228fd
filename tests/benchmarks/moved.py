"""What a process sends to the others: every collective that torch runs while it is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional


def _bytes(tensors: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


SENT: dict[Any, Callable[[Any, int], float]] = {
    c10d.allreduce_: lambda args, ranks: 2 * _bytes(args[0]) * (ranks - 1) / ranks,
    c10d.allreduce_coalesced_: lambda args, ranks: 2 * _bytes(args[0]) * (ranks - 1) / ranks,
    c10d.broadcast_: lambda args, ranks: _bytes(args[0]) * (ranks - 1) / ranks,
    c10d.allgather_: lambda args, ranks: _bytes(args[0]) * (ranks - 1) / ranks,
    c10d._allgather_base_: lambda args, ranks: _bytes(args[0]) * (ranks - 1) / ranks,
    c10d.allgather_into_tensor_coalesced_: lambda args, ranks: _bytes(args[0]) * (ranks - 1) / ranks,
    c10d._reduce_scatter_base_: lambda args, ranks: _bytes(args[1]) * (ranks - 1) / ranks,
    c10d.reduce_scatter_tensor_coalesced_: lambda args, ranks: _bytes(args[1]) * (ranks - 1) / ranks,
    c10d.barrier: lambda args, ranks: 0,
    functional.all_reduce: lambda args, ranks: 2 * _bytes(args[0]) * (ranks - 1) / ranks,
    functional.all_reduce_: lambda args, ranks: 2 * _bytes(args[0]) * (ranks - 1) / ranks,
    functional.all_gather_into_tensor: lambda args, ranks: _bytes(args[0]) * (ranks - 1),
    functional.reduce_scatter_tensor: lambda args, ranks: _bytes(args[0]) * (ranks - 1) / ranks,
    functional.wait_tensor: lambda args, ranks: 0,
}
"""Bytes that each of some ranks sends, with the ring algorithms that move the least; of groups that hold all ranks."""


class Moved(TorchDispatchMode):
    """Collects (operation, bytes sent by a rank) of each collective while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in SENT:
            self.calls.append((packet.__name__, round(SENT[packet](args, distributed.get_world_size()))))
        elif func.namespace in ("c10d", "_c10d_functional"):
            raise NotImplementedError(f"what {func} sends is not known here")
        return func(*args, **(kwargs or {}))


class OneStep(Callback):
    """Counts what one optimizer step sends: the second, which is not timed, as counting takes time.

    Not the first: DistributedDataParallel rearranges its buckets after it.
    """

    def __init__(self) -> None:
        self.moved = Moved()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.moved.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.moved.__exit__(None, None, None)
