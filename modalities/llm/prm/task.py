"""Process reward models: the score of a step stands at the last token of the separator after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ....common.data.processing import Batch
from ....common.evaluation.each import Part
from ....common.task import LossSum, Predicted
from ..reward import task as reward
from ..reward.model import scores
from .config import Config
from .processing import StepProcessing

LABELS = ("wrong", "right")
"""Classes of a step, in the order of the scores."""


@dataclass(frozen=True)
class Steps:
    """What the model makes of one solution.

    Args:
        loss: summed over its steps.
        scores: probability that each step is right.
        labels: whether it is.
        fields: what it may be sliced by.
        where: place of the row.
    """

    loss: float
    scores: tuple[float, ...]
    labels: tuple[bool, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def given(self) -> tuple[bool, ...]:
        """Which steps the model takes for right."""
        return tuple(one > 0.5 for one in self.scores)


class Task(reward.Task):
    """Trains a language model, or an adapter of it, with a head that says of every step whether it is right (Uesato et
    al., arXiv:2211.14275; Lightman et al., arXiv:2305.20050)."""

    metrics: ClassVar[dict[str, str]] = {
        "loss": "min", "accuracy": "max", "f1": "max", "f1_wrong": "max", "first_error": "max",
    }  # fmt: skip

    recipe: Config  # type: ignore[assignment]
    processing: StepProcessing  # type: ignore[assignment]
    per_token = True

    @classmethod
    def make_processing(cls, recipe: Any, weights: Any = None) -> StepProcessing:  # type: ignore[override]
        return StepProcessing(recipe, weights)

    @staticmethod
    def names(recipe: Any) -> list[str]:
        return ["loss", "accuracy"]

    @staticmethod
    def classes(recipe: Any) -> tuple[str, ...] | None:
        return LABELS

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        return cls.metrics

    def _scored(self, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], list[int]]:
        """([S, 2] scores of the steps, by name [S] values, how many steps each example has)."""
        given, wanted = scores(self.scorer, data, data["steps"]), data["step_labels"]
        losses = functional.cross_entropy(given, wanted, reduction="none")
        return given, {"loss": losses, "accuracy": (given.argmax(dim=1) == wanted).float()}, data["steps_of"]

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Loss, scores and labels of each example's steps."""
        data = batch.data
        given, found, counts = self._scored(data)
        right = given.softmax(dim=1)[:, 1]
        columns = (found["loss"].double(), right, data["step_labels"].bool())
        cut = [[part.tolist() for part in column.split(counts)] for column in columns]
        records = [
            Steps(sum(losses), tuple(said), tuple(labels), fields, where)
            for losses, said, labels, fields, where in zip(*cut, data["fields"], data["where"], strict=True)
        ]
        return Predicted(records, LossSum(found["loss"].double().sum(), len(right)))

    def means(self, records: Sequence[Any]) -> dict[str, Any]:
        """Over steps: loss, accuracy, F1 of right and of wrong ones (0 where there are none); over solutions:
        `first_error`, the share of which the first wrong step, or that there is none, is told right."""
        pairs = [pair for one in records for pair in zip(one.given, one.labels, strict=True)]
        count = len(pairs)
        first = [(*one.given, False).index(False) == (*one.labels, False).index(False) for one in records]
        return {
            "loss": sum(one.loss for one in records) / count if count else float("nan"),
            "accuracy": sum(given == label for given, label in pairs) / count if count else float("nan"),
            "f1": _f1(pairs, True),
            "f1_wrong": _f1(pairs, False),
            "first_error": sum(first) / len(first) if first else float("nan"),
            "count": count,
        }

    def parts(self, record: Any) -> dict[str, Part]:
        right = sum(given == label for given, label in zip(record.given, record.labels, strict=True))
        return {"loss": (record.loss, len(record.labels)), "accuracy": (float(right), len(record.labels))}

    def samples(self, records: Sequence[Any], number: int) -> list[dict[str, Any]]:
        """The solutions with the largest losses, with the score and the label of each step."""
        worst = sorted(records, key=lambda one: -one.loss / max(1, len(one.labels)))[:number]
        return [{"where": one.where, "scores": list(one.scores), "labels": list(one.labels)} for one in worst]


def _f1(pairs: Sequence[tuple[bool, bool]], kind: bool) -> float:
    """2 hits / (2 hits + false alarms + misses) of steps that are `kind`."""
    hits = sum(given == label == kind for given, label in pairs)
    errors = sum(given != label for given, label in pairs)
    return 2 * hits / (2 * hits + errors) if hits else 0.0
