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
    on_policy: float = Field(0.0, ge=0, le=1)
    """Probability that an example's last answer is one that the student samples, as it is now (GKD)."""
    max_new_tokens: int = Field(256, ge=1)
    """With `on_policy`: most tokens of an answer that the student samples."""
    sampling_temperature: float = Field(1.0, gt=0)
    """With `on_policy`: temperature at which the student samples."""
    top_k: int | None = Field(None, ge=1)
    """Compute the teacher once, before the training, and keep the log-probabilities of this many most probable tokens
    at each place, by content, in `OUTPUT/teacher`; all other tokens count as one. Absent: the teacher is run in each
    step."""
    max_gb: float = Field(20.0, gt=0)
    """With `top_k`: most space of what is kept, in GB (10^9 bytes); 8 k + 4 bytes for each token that carries loss."""

    @property
    def share(self) -> float:
        """Share of the teacher in the mixture."""
        known = {"forward": 0.0, "reverse": 1.0, "js": 0.5}
        return known[self.divergence] if self.mixture is None else self.mixture

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.divergence == "generalised") != (self.mixture is not None):
            raise ValueError("divergence: generalised and mixture go together")
        if self.on_policy and self.top_k is not None:
            raise ValueError("top_k is computed before the training, and on_policy asks the teacher about new answers")
        return self


class DistillModel(LanguageModel):
    teacher: LocalOrHub
    """The model that is learned from; with the same tokenizer, though its vocabulary may be padded to another size."""


class Config(Recipe):
    task: DistillTask
    """What is trained: the divergence, and on which answers."""
    model: DistillModel
    """What it starts from, which parts are trained, and the teacher."""
    data: ChatData
    """What it is trained and evaluated on, and which tokens carry loss."""
    evaluate: ChatEvaluate = ChatEvaluate()
    """Evaluation during training and by `luthier evaluate`."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.task.top_k is not None and self.data.streaming:
            raise ValueError("task.top_k needs the data at once; not with data.streaming")
        if self.task.on_policy and self.train.strategy not in ("auto", "ddp"):
            raise ValueError("task.on_policy: a model that is cut over devices can't sample here; use ddp")
        return self
