"""The losses of online reinforcement learning by name, and what is usual with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .cispo import cispo
from .grpo import grpo, of_tokens
from .gspo import gspo, of_completions, of_means, rloo
from .sampled import Sampled, Share, Term
from .sapo import sapo

Baseline = Literal["group", "leave_one_out", "none"]
Scale = Literal["group", "batch", "whiten", "none"]


@dataclass(frozen=True)
class Online:
    """A loss and its usual settings.

    Args:
        term: loss of a token.
        share: how tokens are weighed.
        clip_low: usual clip below.
        clip_high: usual clip above.
        ratio_cap: usual largest ratio.
        baseline: what is usually taken from a reward.
        scale: what it is usually divided by then.
        kl_in_reward: whether the KL usually stands in the reward, and not in the loss.
        ratio: the ratio that it has for each token [R].
    """

    term: Term
    share: Share = "completion"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = None
    baseline: Baseline = "group"
    scale: Scale = "group"
    kl_in_reward: bool = False
    ratio: Callable[[Sampled], Tensor] = of_tokens

    @property
    def by_completion(self) -> bool:
        """Whether it has one ratio, and so one advantage, for a whole completion."""
        return self.ratio is not of_tokens


ONLINE: dict[str, Online] = {
    "grpo": Online(grpo),
    "dr_grpo": Online(grpo, "length", scale="none"),
    "dapo": Online(grpo, "token", clip_high=0.28),
    "bnpo": Online(grpo, "token"),
    "gspo": Online(gspo, clip_low=3e-4, clip_high=4e-4, ratio=of_means),
    "cispo": Online(cispo, "token", ratio_cap=5.0),
    "sapo": Online(sapo),
    "rloo": Online(rloo, baseline="leave_one_out", scale="none", kl_in_reward=True, ratio=of_completions),
    "reinforce_pp": Online(grpo, "token", baseline="none", scale="whiten", kl_in_reward=True),
    "reinforce_pp_baseline": Online(grpo, "token", baseline="group", scale="whiten"),
}
