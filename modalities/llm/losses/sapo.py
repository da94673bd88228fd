"""SAPO: a soft gate in the place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from .sampled import Sampled, Settings


def sapo(given: Sampled, settings: Settings) -> Tensor:
    """-(4 / t) sigma(t (w - 1)) A, with the temperature t of the advantage's sign (Gao et al., arXiv:2511.20347, eq. 5
    and 6). At w = 1 its gradient is that of w A."""
    positive, negative = (
        torch.full_like(given.advantages, t) for t in (settings.temperature_positive, settings.temperature_negative)
    )
    temperature = torch.where(given.advantages > 0, positive, negative)
    return -4 / temperature * torch.sigmoid(temperature * (given.log_ratio.exp() - 1)) * given.advantages
