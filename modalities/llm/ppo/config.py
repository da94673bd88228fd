"""The recipe of PPO."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ....common.recipe import Section, TaskSection
from ..losses.kl import Estimator
from ..losses.sampled import Settings
from ..rl.sections import OnlineRecipe


class PenaltySection(Section):
    """What is taken from the reward of each token for leaving the reference."""

    weight: float = Field(0.05, ge=0)
    """Strength (beta); 0: there is no reference."""
    estimator: Estimator = "k1"
    """How the KL is estimated on a token; see `losses/kl.py`."""


class ProximalTask(TaskSection):
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Ratios are clipped at 1 - this."""
    clip_high: float = Field(0.2, ge=0)
    """Ratios are clipped at 1 + this."""
    ratio_cap: float | None = Field(None, gt=1)
    """Largest ratio where an advantage is negative (dual clip, arXiv:1912.09729)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """What a reward is worth a token earlier."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Of the advantage estimates (arXiv:1506.02438): 1 trusts the rewards, 0 the critic."""
    value_weight: float = Field(0.1, ge=0)
    """Weight of the critic's loss."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far a value may move from that of the rollout before it no longer counts as better; null: any."""
    whiten: bool = True
    """Give the advantages of a rollout mean 0 and deviation 1."""
    kl: PenaltySection = PenaltySection()
    """Penalty for leaving the reference."""
    entropy_weight: float = Field(0.0, ge=0)
    """Weight of the entropy of each token's distribution, as a bonus."""
    mask_truncated: bool = False
    """Leave completions that were cut at `rollout.max_new_tokens` out of the loss."""

    def settings(self, max_tokens: int) -> Settings:
        """The constants of the policy's loss."""
        return Settings(self.clip_low, self.clip_high, self.ratio_cap, max_tokens)


class Config(OnlineRecipe):
    task: ProximalTask
    """What is trained: the losses of policy and critic, and the penalty. Epochs over a rollout are
    `rollout.iterations`, minibatches `rollout.steps`."""

    @model_validator(mode="after")
    def _refers(self) -> Self:
        if self.model.reference is not None and not self.task.kl.weight:
            raise ValueError("model.reference is not used without task.kl.weight")
        return self
