"""The clipped losses of a group's completions. With the ratio w = policy / old policy of a token and its advantage A,
all of them have PPO's term -min(w A, clip(w, 1 - low, 1 + high) A) (Schulman et al., arXiv:1707.06347, eq. 7). They
differ in how tokens are weighed (`sampled.Share`) and in what is usual around them:

| name | tokens | usual |
| --- | --- | --- |
| grpo | by completion | scaled by the group (Shao et al., DeepSeekMath, arXiv:2402.03300) |
| dr_grpo | by length | not scaled (Liu et al., arXiv:2503.20783) |
| dapo | all alike | clipped higher above than below (Yu et al., arXiv:2503.14476) |
| bnpo | all alike | (as TRL names it; here the window of an optimizer step is one batch) |
| reinforce_pp | all alike | normalised over the batch (Hu et al., arXiv:2501.03262) |
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampled import Sampled, Settings


def clipped(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    """-min(w A, clip(w) A) of ratios and advantages of one shape. With `ratio_cap`, w in the first is at most that, so
    that a negative advantage has no gradient there (Ye et al., dual clip, arXiv:1912.09729)."""
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    capped = ratio if settings.ratio_cap is None else ratio.clamp(max=settings.ratio_cap)
    return -torch.minimum(capped * advantages, bounded * advantages)


def of_tokens(given: Sampled) -> Tensor:
    """[R] ratio of each token."""
    return given.log_ratio.exp()


def grpo(given: Sampled, settings: Settings) -> Tensor:
    return clipped(of_tokens(given), given.advantages, settings)
