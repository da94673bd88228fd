"""Losses with one ratio for a whole completion; each token has the loss of its completion."""

from __future__ import annotations

from torch import Tensor

from .grpo import clipped
from .sampled import Sampled, Settings


def of_means(given: Sampled) -> Tensor:
    """[R] for each token the geometric mean of the ratios in its completion."""
    return given.spread((given.summed(given.log_ratio) / given.counts).exp())


def of_completions(given: Sampled) -> Tensor:
    """[R] for each token the ratio of its completion's probability."""
    return given.spread(given.summed(given.log_ratio).exp())


def gspo(given: Sampled, settings: Settings) -> Tensor:
    """Clipped, with the mean ratio (Zheng et al., arXiv:2507.18071, eq. 5 and 7)."""
    return clipped(of_means(given), given.advantages, settings)


def rloo(given: Sampled, settings: Settings) -> Tensor:
    """Clipped, with the ratio of the completion's probability; on-policy its gradient is that of REINFORCE with the
    completion as one action (Ahmadian et al., arXiv:2402.14740, eq. 6 and 7)."""
    return clipped(of_completions(given), given.advantages, settings)
