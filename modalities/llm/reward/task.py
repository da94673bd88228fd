"""Reward models: the score of an answer stands at its last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ....common import task
from ....common.data.processing import Batch
from ....common.evaluation.each import Each, Part
from ....common.task import LossSum, Predicted
from ..causal import parts
from ..losses.bradley_terry import bradley_terry
from ..losses.plackett_luce import plackett_luce
from .config import Config
from .model import load_scorer, probe_scores, scores
from .processing import RewardProcessing, padding


@dataclass(frozen=True)
class Scored:
    """What the model makes of one example.

    Args:
        sums: by name, over `count`: the loss and what is logged with it.
        count: its pairs, rankings or answers, as the loss counts.
        scores: of its answers, from the best to the worst; of a class: all of them.
        fields: what it may be sliced by.
        where: place of the row.
    """

    sums: Mapping[str, float]
    count: int
    scores: tuple[float, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


class Task(task.Task):
    """Trains a language model, or an adapter of it, with a head that scores answers."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "accuracy": "max", "margin": "max", "error": "min"}

    recipe: Config
    processing: RewardProcessing
    model: Any
    per_token: ClassVar[bool] = False
    """Whether tokens are scored, and not sequences."""

    def __init__(self, recipe: Any, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        tokenizer = self.processing.tokenizer
        labels = self.classes(recipe)
        pad = padding(tokenizer, self.processing.terminators())
        self.model, scorer = load_scorer(recipe, len(labels or (0,)), pad, weights, self.per_token)
        self._scorer = [scorer]  # in a list, so that its parameters are not registered twice
        if labels is not None:
            scorer.config.id2label = dict(enumerate(labels))
            scorer.config.label2id = {name: number for number, name in enumerate(labels)}
        self._pad = pad
        probe_scores(scorer, recipe.data.max_length)
        self.log_names = tuple(self.names(recipe)[1:])

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> RewardProcessing:
        return RewardProcessing(recipe, weights)

    @staticmethod
    def classes(recipe: Any) -> tuple[str, ...] | None:
        """Names of the classes, in the order of the scores; None: one score."""
        found: tuple[str, ...] | None = recipe.task.labels
        return found

    @staticmethod
    def names(recipe: Any) -> list[str]:
        """What is known of each example, the loss first."""
        known = {"regression": ["error"], "classification": ["accuracy"]}
        return ["loss", *known.get(recipe.task.loss, ["accuracy", "margin", "chosen_reward", "rejected_reward"])]

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        named = cls.names(recipe)
        return {name: better for name, better in cls.metrics.items() if name in named}

    @property
    def scorer(self) -> Any:
        """The transformers model inside."""
        return self._scorer[0]

    def compile_parts(self) -> None:
        task.compile_layers(self.scorer)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Summed loss of all pairs, rankings or answers."""
        _, found, _ = self._scored(data)
        summed = torch.stack([value.detach().sum() for value in found.values()]).tolist()
        logs = dict(zip(found, summed, strict=True))
        logs.pop("loss")
        return LossSum(found["loss"].sum(), len(found["loss"]), logs)

    def _scored(self, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], list[int]]:
        """([A, labels] scores, by name [C] values of what is counted, how many each example has)."""
        section = self.recipe.task
        given = scores(self.scorer, data)
        if section.judges:
            return given, self._judged(given, data), [1] * len(given)
        single = given[:, 0]
        chosen, rejected = single[data["pairs"]].T
        pairs = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        if section.loss == "bradley_terry":
            losses = bradley_terry(chosen, rejected, data["margins"], section.centering)
            return given, {"loss": losses, **pairs}, data["pairs_of"]
        lists = [plackett_luce(part, section.centering) for part in single.split(data["answers"])]
        means = {name: [part.mean() for part in value.split(data["pairs_of"])] for name, value in pairs.items()}
        found = {"loss": torch.stack(lists), **{name: torch.stack(value) for name, value in means.items()}}
        return given, found, [1] * len(lists)

    def _judged(self, given: Tensor, data: dict[str, Any]) -> dict[str, Tensor]:
        if self.recipe.task.loss == "classification":
            wanted = torch.tensor(data["labels_of"], device=given.device)
            losses = functional.cross_entropy(given, wanted, reduction="none")
            return {"loss": losses, "accuracy": (given.argmax(dim=1) == wanted).float()}
        numbers = torch.tensor(data["labels_of"], device=given.device, dtype=torch.float32)
        apart = given[:, 0] - numbers
        return {"loss": apart.square(), "error": apart.abs()}

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Loss, statistics and scores of each example."""
        data = batch.data
        given, found, counts = self._scored(data)
        each = {name: [float(part.sum()) for part in value.double().split(counts)] for name, value in found.items()}
        rewards = [tuple(part.flatten().tolist()) for part in given.split(data["answers"])]
        records = [
            Scored({name: values[row] for name, values in each.items()}, counts[row], rewards[row], fields, where)
            for row, (fields, where) in enumerate(zip(data["fields"], data["where"], strict=True))
        ]
        return Predicted(records, LossSum(found["loss"].double().sum(), len(found["loss"])))

    def score(self, records: Sequence[Any]) -> dict[str, Any]:
        slices = {name: parts(records, name) for name in self.recipe.evaluate.slices}
        found = {
            name: {value: self.means(part) for value, part in groups.items()}
            for name, groups in slices.items()
            if len(groups) > 1
        }
        return {**self.means(records), "slices": found}

    def means(self, records: Sequence[Scored]) -> dict[str, Any]:
        """Means over what the loss counts, and their number."""
        count = sum(one.count for one in records)
        names = self.names(self.recipe)
        found = {name: sum(one.sums[name] for one in records) / count if count else float("nan") for name in names}
        return {**found, "count": count}

    def parts(self, record: Any) -> dict[str, Part]:
        """What one example adds to those of `means` that are ratios of sums."""
        return {name: (record.sums[name], float(record.count)) for name in self.names(self.recipe)}

    def each(self, records: Sequence[Any]) -> list[Each]:
        return [Each(one.where, self.parts(one), one.fields) for one in records]

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        """The examples with the largest losses, and their scores."""
        worst = sorted(records, key=lambda one: -one.sums["loss"] / max(1, one.count))[:number]
        return [{"where": one.where, "scores": list(one.scores), "loss": one.sums["loss"]} for one in worst]

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, directory: Path) -> None:
        """As `AutoModelForSequenceClassification` loads it; of an adapter with the head. The tokenizer's padding is one
        that ends no sequence."""
        self.model.save_pretrained(directory)
        tokenizer = self.processing.tokenizer
        before = tokenizer.pad_token_id
        tokenizer.pad_token_id = self._pad
        try:
            tokenizer.save_pretrained(directory)
        finally:
            tokenizer.pad_token_id = before
