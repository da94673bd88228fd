"""The recipe of process reward models."""

from __future__ import annotations

from pydantic import Field

from ....common.recipe import Recipe, TaskSection
from ..dpo.config import PreferenceData
from ..reward.config import RewardEvaluate, RewardModel


class StepTask(TaskSection):
    step_separator: str = Field("\n", min_length=1)
    """What is written after each step; the step's score stands at its last token. May be a special token."""


class Config(Recipe):
    task: StepTask
    """What is trained: how steps are told apart."""
    model: RewardModel
    """What it starts from (a language model, or one with a head of tokens), and which parts are trained."""
    data: PreferenceData
    """What it is trained and evaluated on: rows of `prompt`, `completions` and `labels`."""
    evaluate: RewardEvaluate = RewardEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
