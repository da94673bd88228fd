"""The recipe of online reinforcement learning without a critic."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ....common.recipe import TaskSection
from ..losses.online import ONLINE, Baseline, Online, Scale
from ..losses.sampled import Settings
from ..rl.sections import KLSection, OnlineRecipe

Name = Literal[
    "grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "reinforce_pp_baseline",
]  # fmt: skip


class GroupTask(TaskSection):
    loss: Name = "grpo"
    """The loss, by TRL's names where it has it; formulas and papers stand in `losses/`. What is usual with each, the
    defaults of the next fields, stands in `losses/online.py`."""
    baseline: Baseline | None = None
    """What is taken from a reward: the mean of its `group`, that of the others in it (`leave_one_out`), or nothing."""
    scale: Scale | None = None
    """What that is divided by: the standard deviation of the rewards in the `group` or the `batch`; `whiten`: mean 0
    and deviation 1 in the batch, which is all completions of a rollout; or nothing."""
    clip_low: float | None = Field(None, ge=0, lt=1)
    """Ratios are clipped at 1 - this."""
    clip_high: float | None = Field(None, ge=0)
    """Ratios are clipped at 1 + this."""
    ratio_cap: float | None = Field(None, gt=1)
    """Largest ratio: of cispo, and the second clip of the clipped losses where an advantage is negative."""
    sapo_temperature_positive: float = Field(1.0, gt=0)
    """How soon sapo's gate closes where an advantage is positive."""
    sapo_temperature_negative: float = Field(1.05, gt=0)
    """How soon it closes where it is not."""
    kl: KLSection = KLSection()
    """Penalty for leaving the reference."""
    entropy_weight: float = Field(0.0, ge=0)
    """Weight of the entropy of each token's distribution, as a bonus."""
    zero_variance: Literal["count", "drop", "resample"] = "count"
    """Groups whose completions are all worth the same, which teach nothing where a baseline is taken: `count` them in
    what the loss is divided by, as TRL does; `drop` them; or complete their prompts anew, and drop them if that
    does not help (dynamic sampling, on the same prompts)."""
    resample: int = Field(3, ge=1)
    """How often, at most."""
    mask_truncated: bool = False
    """Leave completions that were cut at `rollout.max_new_tokens` out of the loss (overlong filtering, DAPO,
    arXiv:2503.14476); their rewards still count in their group."""

    @property
    def online(self) -> Online:
        return ONLINE[self.loss]

    @property
    def kl_in_reward(self) -> bool:
        usual = self.online.kl_in_reward
        return bool(self.kl.weight) and (usual if self.kl.place is None else self.kl.place == "reward")

    @property
    def kl_in_loss(self) -> bool:
        return bool(self.kl.weight) and not self.kl_in_reward

    @property
    def used_baseline(self) -> Baseline:
        return self.online.baseline if self.baseline is None else self.baseline

    @property
    def used_scale(self) -> Scale:
        return self.online.scale if self.scale is None else self.scale

    def settings(self, max_tokens: int) -> Settings:
        """The constants of the loss."""
        usual = self.online
        return Settings(
            usual.clip_low if self.clip_low is None else self.clip_low,
            usual.clip_high if self.clip_high is None else self.clip_high,
            usual.ratio_cap if self.ratio_cap is None else self.ratio_cap,
            max_tokens,
            self.sapo_temperature_positive,
            self.sapo_temperature_negative,
        )

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.kl_in_loss and self.kl.estimator == "k1":
            raise ValueError("kl: k1 has no gradient on average in the loss; use k2 or k3, or place: reward")
        return self


class Config(OnlineRecipe):
    task: GroupTask
    """What is trained: the loss, advantages and penalties."""

    @model_validator(mode="after")
    def _compares(self) -> Self:
        if self.rollout.num_generations < 2 and self.task.used_baseline != "none":
            raise ValueError("rollout.num_generations: a completion alone has none to be compared with")
        if self.model.reference is not None and not self.task.kl.weight:
            raise ValueError("model.reference is not used without task.kl.weight")
        return self
