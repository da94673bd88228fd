"""Preference optimisation on pairs of answers."""

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
from ..losses.dpo import ratios
from ..losses.named import LOSSES
from ..losses.pairs import Pairs, Settings
from ..policy import PolicyTask
from ..sft.task import Answered
from .config import FREE, Config
from .processing import PreferenceProcessing

MEANS = ("accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp", "kl")
"""What is logged of pairs beside the loss."""


@dataclass(frozen=True)
class Preferred:
    """What the model makes of the pairs of one example.

    Args:
        sums: over its pairs: the loss, and each of `MEANS`.
        pairs: how many it has.
        fields: what it may be sliced by.
        where: place of the row.
        answered: the model's own answer, if it was asked.
    """

    sums: Mapping[str, float]
    pairs: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    answered: Answered | None = None


class Task(PolicyTask):
    """Trains a causal language model, or an adapter of it, to prefer some answers to others."""

    metrics: ClassVar[dict[str, str]] = {
        "loss": "min", "accuracy": "max", "margin": "max", "chosen_reward": "max", "chosen_logp": "max",
        **dict.fromkeys(SCORES, "max"),
    }  # fmt: skip

    recipe: Config
    processing: PreferenceProcessing

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.log_names = (*self.log_names, *MEANS)
        task = recipe.task
        self._losses = [(LOSSES[one.name], one.weight) for one in task.loss]
        self._settings = Settings(
            task.beta, task.label_smoothing, task.f_divergence, task.f_alpha, task.discopop_tau, task.simpo_gamma
        )
        self._by_means = all(one.name in ("orpo", "simpo") for one in task.loss)

    @classmethod
    def make_processing(cls, recipe: Any, weights: Path | None = None) -> PreferenceProcessing:
        return PreferenceProcessing(recipe, weights)

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        """Those of pairs, the benchmarks, and the scores of answers that the recipe asks for."""
        section = recipe.evaluate.generate
        scores = [] if section is None else [score_name(given) for given in section.scores]
        own = {name: better for name, better in cls.metrics.items() if name not in SCORES}
        return {**own, **harness.names(recipe.evaluate.harness), **dict.fromkeys(scores, "max")}

    @property
    def needs_reference(self) -> bool:
        return any(one.name not in FREE for one in self.recipe.task.loss)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Summed loss of all pairs; an answer's log-probability is the sum over its tokens that carry loss."""
        out, values, found = self._compared(data)
        total, count = values.sum(), len(values)
        summed = torch.stack([value.detach().sum() for value in found.values()]).tolist()  # read at once
        logs = dict(zip(found, summed, strict=True))
        if self._router_weight:
            router = self._router_loss(out.router_logits) * count
            total, logs["router"] = total + self._router_weight * router, float(router.detach())
        return LossSum(total, count, logs)

    def _compared(self, data: dict[str, Any]) -> tuple[Any, Tensor, dict[str, Tensor]]:
        """(the decoder's output, [P] losses, `MEANS` [P])."""
        reference = self.reference_log_probs(data) if self.needs_reference else None
        out = self._run(data)
        own = self.answer_log_probs(out.last_hidden_state[0], data)
        pairs = _pairs(own, torch.zeros_like(own) if reference is None else reference, data)
        values = sum(weight * loss(pairs, self._settings) for loss, weight in self._losses)
        if self.recipe.task.sft:
            values = values - self.recipe.task.sft * pairs.chosen_mean
        assert isinstance(values, Tensor)
        with torch.no_grad():
            return out, values, self._means(pairs)

    def _means(self, pairs: Pairs) -> dict[str, Tensor]:
        """Rewards are beta log pi / reference; without a reference beta log pi, of a token in orpo and simpo. `kl` is
        the mean of log reference / pi over the tokens of both answers: KL(reference || pi), if they were drawn from the
        reference."""
        chosen, rejected = (pairs.chosen_mean, pairs.rejected_mean) if self._by_means else ratios(pairs)
        chosen, rejected = self._settings.beta * chosen, self._settings.beta * rejected
        tokens = pairs.chosen_tokens + pairs.rejected_tokens
        apart = -sum(ratios(pairs)) / tokens if self.needs_reference else torch.zeros_like(chosen)
        return {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_logp": pairs.chosen,
            "rejected_logp": pairs.rejected,
            "kl": apart,
        }

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Loss and statistics of each example's pairs, and the model's answer to its prompt if the recipe asks."""
        data = batch.data
        _, values, found = self._compared(data)
        parts = {name: value.double().split(data["pairs_of"]) for name, value in {"loss": values, **found}.items()}
        records = [
            Preferred({name: float(part[row].sum()) for name, part in parts.items()}, number, fields, where)
            for row, (number, fields, where) in enumerate(
                zip(data["pairs_of"], data["fields"], data["where"], strict=True)
            )
        ]
        answers = self.answered(batch, [Told(0.0, 0, 0, one.fields) for one in records])
        records = [replace(one, answered=answers.get(row)) for row, one in enumerate(records)]
        return Predicted(records, LossSum(values.double().sum(), len(values)))

    def means(self, records: Sequence[Preferred]) -> dict[str, Any]:
        """Means over pairs, and of the answers."""
        count = sum(one.pairs for one in records)
        names = ("loss", *MEANS)
        found = {name: sum(one.sums[name] for one in records) / count if count else float("nan") for name in names}
        answers = [one.answered for one in records if one.answered is not None]
        return {**found, "pairs": count, **self.answer_means(answers)}

    def parts(self, record: Any) -> dict[str, Part]:
        answer = {} if record.answered is None else self.answer_parts(record.answered)
        return {**{name: (record.sums[name], record.pairs) for name in ("loss", *MEANS)}, **answer}

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        """Some answers of the model; if it was not asked, the pairs that it gets most wrong."""
        answers = [one.answered for one in records if one.answered is not None]
        if answers:
            return super().samples(answers, number)
        worst = sorted(records, key=lambda one: one.sums["margin"] / max(1, one.pairs))[:number]
        return [{"where": one.where, "margin": one.sums["margin"] / max(1, one.pairs)} for one in worst]


def _pairs(own: Tensor, reference: Tensor, data: dict[str, Any]) -> Pairs:
    """Pairs of the answers' log-probabilities, [A] each."""
    chosen, rejected = data["pairs"].T
    counts = data["counts"].to(own.dtype)
    return Pairs(own[chosen], own[rejected], reference[chosen], reference[rejected], counts[chosen], counts[rejected])
