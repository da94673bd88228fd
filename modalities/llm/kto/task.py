"""KTO: each answer is good or bad, measured against how far the model has gone from the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....common.data.processing import Batch
from ....common.evaluation.each import Part
from ....common.task import LossSum, Predicted
from .. import harness
from ..causal import Told
from ..config import SCORES, score_name
from ..losses.kto import apo_zero_unpaired, kl_estimate, kto
from ..policy import PolicyTask
from ..sft.task import Answered
from .config import Config
from .processing import KtoProcessing


@dataclass(frozen=True)
class Valued:
    """What the model makes of one answer.

    Args:
        ratio: log pi / reference of it, in nats.
        other: the same of another row's answer to its prompt; None: there is none.
        desirable: whether it is good.
        fields: what it may be sliced by.
        answered: the model's own answer, if it was asked.
        where: place of the row.
    """

    ratio: float
    other: float | None
    desirable: bool
    fields: Mapping[str, Any] = field(default_factory=dict)
    answered: Answered | None = None
    where: str = ""


class Task(PolicyTask):
    """Trains a causal language model, or an adapter of it, towards good answers and away from bad ones."""

    metrics: ClassVar[dict[str, str]] = {
        "loss": "min", "accuracy": "max", "desirable_reward": "max", "undesirable_reward": "min",
        **dict.fromkeys(SCORES, "max"),
    }  # fmt: skip

    recipe: Config
    processing: KtoProcessing

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.log_names = (*self.log_names, "accuracy", "kl")

    @classmethod
    def make_processing(cls, recipe: Any, weights: Path | None = None) -> KtoProcessing:
        return KtoProcessing(recipe, weights)

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        """Those of answers, the benchmarks, and the scores of the model's own answers that the recipe asks for."""
        section = recipe.evaluate.generate
        scores = [] if section is None else [score_name(given) for given in section.scores]
        own = {name: better for name, better in cls.metrics.items() if name not in SCORES}
        return {**own, **harness.names(recipe.evaluate.harness), **dict.fromkeys(scores, "max")}

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Summed loss of all answers. The KL is estimated on the batch: from answers of other rows to its prompts."""
        reference = self.reference_log_probs(data)
        out = self._run(data)
        ratios = self.answer_log_probs(out.last_hidden_state[0], data) - reference
        own, other, desirable = self._split(ratios, data)
        divergence = kl_estimate(other)
        values = self._values_of(own, desirable, divergence)
        count = len(values)
        right = ((own > divergence) == desirable).sum()
        logs = dict(zip(("accuracy", "kl"), torch.stack([right, divergence * count]).tolist(), strict=True))
        total = values.sum()
        if self._router_weight:
            router = self._router_loss(out.router_logits) * count
            total, logs["router"] = total + self._router_weight * router, float(router.detach())
        return LossSum(total, count, logs)

    def _values_of(self, ratio: Tensor, desirable: Tensor, divergence: Tensor) -> Tensor:
        task = self.recipe.task
        weights = task.beta, task.desirable_weight, task.undesirable_weight
        if task.loss == "apo_zero_unpaired":
            return apo_zero_unpaired(ratio, desirable, *weights)
        return kto(ratio, desirable, divergence, *weights)

    @staticmethod
    def _split(ratios: Tensor, data: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """([B] of the rows' own answers, [O] of others' to their prompts, [B] whether they are good)."""
        answers = torch.tensor(data["answers"], device=ratios.device)
        begins = answers.cumsum(0) - answers
        others = begins[answers > 1] + 1
        return ratios[begins], ratios[others], torch.tensor(data["labels_of"], device=ratios.device)

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Log-ratios of each answer; the loss follows from those of the whole set."""
        data = batch.data
        out = self._run(data)
        ratios = self.answer_log_probs(out.last_hidden_state[0], data) - self.reference_log_probs(data)
        parts = [part.tolist() for part in ratios.double().split(data["answers"])]
        records = [
            Valued(part[0], part[1] if len(part) > 1 else None, label, fields, where=where)
            for part, label, fields, where in zip(parts, data["labels_of"], data["fields"], data["where"], strict=True)
        ]
        answers = self.answered(batch, [Told(0.0, 0, 0, one.fields) for one in records])
        return Predicted([replace(one, answered=answers.get(row)) for row, one in enumerate(records)])

    def means(self, records: Sequence[Valued]) -> dict[str, Any]:
        """Means over answers; the KL is that of these records."""
        own = torch.tensor([one.ratio for one in records], dtype=torch.float64)
        desirable = torch.tensor([one.desirable for one in records], dtype=torch.bool)
        others = torch.tensor([one.other for one in records if one.other is not None], dtype=torch.float64)
        divergence = kl_estimate(others)
        losses = self._values_of(own, desirable, divergence)
        beta = self.recipe.task.beta
        answers = [one.answered for one in records if one.answered is not None]
        return {
            "loss": float(losses.mean()),
            "accuracy": float(((own > divergence) == desirable).double().mean()),
            "desirable_reward": beta * float(own[desirable].mean()),
            "undesirable_reward": beta * float(own[~desirable].mean()),
            "kl": float(divergence),
            "count": len(records),
            **self.answer_means(answers),
        }

    def parts(self, record: Any) -> dict[str, Part]:
        """Of the answers; the loss of each depends on all the others."""
        return {} if record.answered is None else self.answer_parts(record.answered)

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        return super().samples([one.answered for one in records if one.answered is not None], number)
