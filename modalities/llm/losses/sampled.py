"""What the losses of online reinforcement learning are given: the tokens of completions, and how each is weighed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampled:
    """The tokens with loss of A completions, R in all, one completion after the other. What carries no loss is not
    among them, so that no sum and no count can be over another mask.

    Args:
        log_probs: [R] of each token under the policy, in nats; with gradient.
        old: [R] the same under the policy that this rollout was trained from first, without gradient. Where it has not
            moved since, these are the same numbers, and every ratio is exactly 1.
        advantages: [R], without gradient; the same for all tokens of a completion, but for rewards of tokens.
        counts: [A] int64, tokens of each completion, at least 1.
    """

    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    counts: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """[R] log of policy / old policy."""
        return self.log_probs - self.old

    def summed(self, values: Tensor) -> Tensor:
        """[A] sums of [R] values over each completion."""
        return torch.segment_reduce(values, "sum", lengths=self.counts)

    def spread(self, values: Tensor) -> Tensor:
        """[R] the value of its completion for each token, from [A]."""
        return values.repeat_interleave(self.counts)


@dataclass(frozen=True)
class Settings:
    """Constants of the losses.

    Args:
        clip_low: the ratio is clipped at 1 - this.
        clip_high: the ratio is clipped at 1 + this.
        ratio_cap: largest ratio that counts (cispo; the second clip of the others); None: none.
        max_tokens: most tokens of a completion (dr_grpo).
        temperature_positive: how soon the ratio saturates where the advantage is positive (sapo).
        temperature_negative: where it is not.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = None
    max_tokens: int = 256
    temperature_positive: float = 1.0
    temperature_negative: float = 1.05


Term = Callable[[Sampled, Settings], Tensor]
"""(tokens, settings) -> [R] loss of each token."""

Share = Literal["completion", "token", "length"]
"""How tokens are weighed: `completion`: the mean over completions of the mean over each one's tokens (Shao et al.,
arXiv:2402.03300, eq. 3); `token`: the mean over all tokens (Yu et al., DAPO, arXiv:2503.14476, eq. 8); `length`: the
sum over completions x the most tokens of one, a constant (Liu et al., Dr. GRPO, arXiv:2503.20783)."""


def weights(share: Share, counts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[R] weight of each token in the sum, from tokens of each completion [A]."""
    each = counts.to(dtype).reciprocal() if share == "completion" else torch.ones_like(counts, dtype=dtype)
    return each.repeat_interleave(counts)


def denominator(share: Share, completions: int, tokens: int, max_tokens: int) -> float:
    """What the sum is divided by: over the whole accumulation window and all ranks, it is the sum of these.

    Args:
        completions: that count, also those that need no computation since their loss is zero.
        tokens: of them.
        max_tokens: most tokens of a completion.
    """
    return float({"completion": completions, "token": tokens, "length": completions * max_tokens}[share])
