"""CISPO: the weight of importance is clipped, and no token loses its gradient for it."""

from __future__ import annotations

from torch import Tensor

from .sampled import Sampled, Settings


def cispo(given: Sampled, settings: Settings) -> Tensor:
    """-sg(min(w, cap)) A log pi (MiniMax, arXiv:2506.13585, eq. 4 and 5; the cap as in Khatri et al., ScaleRL,
    arXiv:2510.13786, is on the ratio itself)."""
    ratio = given.log_ratio.detach().exp()
    if settings.ratio_cap is not None:
        ratio = ratio.clamp(max=settings.ratio_cap)
    return -ratio * given.advantages * given.log_probs
