"""An average of the trained weights over the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average(nn.Module):
    """Exponential moving average (EMA) of parameters: a <- d a + (1 - d) p, with d = min(decay, (1 + n) / (10 + n)) at
    update n, so that the start values are soon forgotten. Kept in buffers, so that a resumed run goes on with it.

    Args:
        parameters: what is averaged; not registered here.
        decay: in (0, 1).
    """

    updates: Tensor

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float):
        super().__init__()
        self.decay = decay
        self._of = list(parameters)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        for number, parameter in enumerate(self._of):
            self.register_buffer(f"average_{number}", parameter.detach().clone())

    @property
    def values(self) -> list[Tensor]:
        """The averages, in the order of the parameters."""
        return [getattr(self, f"average_{number}") for number in range(len(self._of))]

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters of one more step in."""
        self.updates += 1
        done = float(self.updates)
        decay = min(self.decay, (1 + done) / (10 + done))
        for average, parameter in zip(self.values, self._of, strict=True):
            average.lerp_(parameter.detach().to(average.dtype), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the parameters are the averages."""
        kept = [parameter.data for parameter in self._of]
        for average, parameter in zip(self.values, self._of, strict=True):
            parameter.data = average.to(parameter.dtype)
        try:
            yield
        finally:
            for data, parameter in zip(kept, self._of, strict=True):
                parameter.data = data
