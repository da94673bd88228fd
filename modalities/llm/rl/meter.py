"""Means over an optimizer step: over its whole accumulation window and all ranks, each over what it is a mean of."""

from __future__ import annotations

import torch
from torch import Tensor


class Meter:
    """Sums with their counts, by name; the same names on every rank."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self._parts: list[tuple[str, Tensor]] = []

    def add(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add a sum over so many."""
        of = count if isinstance(count, Tensor) else torch.tensor(float(count), device=total.device)
        self._parts.append((name, torch.stack([total.detach().float(), of.float()])))

    def close(self, device: torch.device, is_split: bool, same: int = 1) -> dict[str, float]:
        """The means since the last call; without those of nothing.

        Args:
            device: of the sum over ranks.
            is_split: whether there are several ranks.
            same: ranks that have the same batches.
        """
        sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)
        for name, part in self._parts:
            sums[self.names.index(name)] += part.to(device)
        self._parts = []
        if is_split:
            torch.distributed.all_reduce(sums)
        return {
            name: total / count
            for name, (total, count) in zip(self.names, (sums / same).tolist(), strict=True)
            if count
        }
