"""The recipe of distillation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ....common.recipe import LocalOrHub, Recipe
from ..config import ChatData, ChatEvaluate, LanguageModel, LanguageTask


class DistillTask(LanguageTask):
    divergence: Literal["forward", "reverse", "js", "generalised"] = "forward"
    """From the teacher's distributions: KL(teacher || student), KL(student || teacher), Jensen-Shannon, or between them
    by `mixture` (GKD, arXiv:2306.13649)."""
    mixture: float | None = Field(None, gt=0, lt=1)
    """With `generalised`: share of the teacher in the mixture; near 0 as forward, near 1 as reverse."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits of both."""
    sft_weight: float = Field(0.0, ge=0)
    """Weight of the loss of the data's own tokens, `task.loss`, beside the divergence."""

    @property
    def share(self) -> float:
        """Share of the teacher in the mixture."""
        known = {"forward": 0.0, "reverse": 1.0, "js": 0.5}
        return known[self.divergence] if self.mixture is None else self.mixture

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.divergence == "generalised") != (self.mixture is not None):
            raise ValueError("divergence: generalised and mixture go together")
        return self


class DistillModel(LanguageModel):
    teacher: LocalOrHub
    """The model that is learned from; with the same tokenizer, though its vocabulary may be padded to another size."""


class Config(Recipe):
    task: DistillTask
    """What is trained: the divergence."""
    model: DistillModel
    """What it starts from, which parts are trained, and the teacher."""
    data: ChatData
    """What it is trained and evaluated on, and which tokens carry loss."""
    evaluate: ChatEvaluate = ChatEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
