"""The recipe of reward models."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ....common.recipe import EvaluateSection, Recipe, TaskSection
from ..config import LanguageModel
from ..dpo.config import PreferenceData


class RewardTask(TaskSection):
    loss: Literal["bradley_terry", "plackett_luce", "regression", "classification"] = "bradley_terry"
    """Of answers that are compared: `bradley_terry`, each pair alone (with the row's `margin`), or `plackett_luce`, the
    whole ranking. Of single answers with a `label`: `regression` (squared error of a number) or `classification`."""
    centering: float = Field(0.0, ge=0)
    """Weight of what keeps the scores of compared answers around 0, such as 0.01 (arXiv:2312.09244)."""
    labels: Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    """Classes of `classification`, in the order of the scores; a row's `label` is one of them."""

    @property
    def judges(self) -> bool:
        """Whether rows judge single answers."""
        return self.loss in ("regression", "classification")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.loss == "classification") != (self.labels is not None):
            raise ValueError("classification and labels go together")
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            raise ValueError("two labels have the same name")
        if self.judges and self.centering:
            raise ValueError("centering is for answers that are compared")
        return self


class RewardModel(LanguageModel):
    @model_validator(mode="after")
    def _is_a_whole_model(self) -> Self:
        if self.new_tokens:
            raise ValueError("new_tokens are not known in reward models; add them when the model is fine-tuned")
        if self.adapter is not None:
            raise ValueError("adapter is not known in reward models; merge it into the model first")
        return self


class RewardEvaluate(EvaluateSection):
    slices: tuple[str, ...] = ("source",)
    """Fields by which metrics are also given: `source`, or any field of the rows."""


class Config(Recipe):
    task: RewardTask
    """What is trained: the loss of scores."""
    model: RewardModel
    """What it starts from (a language model, or one with a head), and which parts are trained."""
    data: PreferenceData
    """What it is trained and evaluated on, and how long examples may be."""
    evaluate: RewardEvaluate = RewardEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
