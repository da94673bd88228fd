"""What the ranks of an online training tell each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..policy import PolicyTask


class RanksTask(PolicyTask):
    """A policy whose rollouts are divided among ranks."""

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum over all ranks."""
        if not self.is_split:
            return values
        found = torch.from_numpy(np.asarray(values, dtype=np.float64)).to(self.device)
        torch.distributed.all_reduce(found)
        return np.asarray((found / self.ranks_alike).cpu().numpy())

    @property
    def is_split(self) -> bool:
        return self._trainer is not None and self.trainer.world_size > 1

    @property
    def ranks_alike(self) -> int:
        """Ranks that share layers, and so have the same batches."""
        return self.trainer.world_size // self.data_rank[1] if self.is_split else 1

    def from_all(self, value: Any) -> list[Any]:
        """A value of each rank."""
        if not self.is_split:
            return [value]
        found: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(found, value)
        return found
