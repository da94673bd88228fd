"""How near an artifact is to the model it was made of: numbers, texts, metrics, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.exportable import Output, comparable
from .formats import SLACK, TOLERANCE


@dataclass(frozen=True)
class Compared:
    """Two runners on the same inputs.

    Args:
        inputs: how many.
        largest: largest absolute difference.
        mean: mean absolute difference.
        scale: largest absolute number that the trained model gives.
        same_text: inputs of which both write the same text; None: they write none.
    """

    inputs: int
    largest: float
    mean: float
    scale: float
    same_text: int | None


def compare(expected: Sequence[Output], found: Sequence[Output]) -> Compared:
    """Differences between what the trained model and an artifact make of the same inputs."""
    differences, scale = [], 0.0
    for one, other in zip(expected, found, strict=True):
        first, second = comparable(one, other)
        differences.append(np.abs(first.astype(np.float64) - second).reshape(-1))
        scale = max(scale, float(np.abs(first).max(initial=0.0)))
    every = np.concatenate(differences)
    written = [one for one in expected if one.text is not None]
    same = sum(one.text == other.text for one, other in zip(expected, found, strict=True)) if written else None
    return Compared(len(expected), _largest(every), float(every.mean()) if every.size else math.nan, scale, same)


def _largest(differences: np.ndarray) -> float:
    """NaN where anything is no number, or there is nothing, so that it fails."""
    return float(differences.max()) if differences.size and np.isfinite(differences).all() else math.nan


def flat(metrics: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, float]:
    """The metrics of a whole set that say which direction is better, by name."""
    return {name: float(metrics[name]) for name in wanted if isinstance(metrics.get(name), int | float)}


@dataclass(frozen=True)
class Report:
    """What is written to `parity.json`.

    Args:
        format: of the artifact.
        dtype: its number format.
        runtime: what ran it, with the version.
        data: set that the inputs and metrics come from.
        compared: differences.
        before: metrics of the trained model, by name.
        after: metrics of the artifact.
        better: of each metric, whether `min` or `max` is.
        deciding: the metric by which the artifact is judged, as the best checkpoint was; the others are told.
    """

    format: str
    dtype: str
    runtime: str
    data: str
    compared: Compared
    before: Mapping[str, float]
    after: Mapping[str, float]
    better: Mapping[str, str]
    deciding: str

    @property
    def allowed(self) -> float:
        """Largest difference allowed."""
        return TOLERANCE[self.dtype] * self.compared.scale

    @property
    def slack(self) -> float:
        """How much worse the deciding metric may be."""
        return SLACK[self.dtype] * max(1.0, abs(self.before.get(self.deciding, 0.0)))

    def faults(self) -> list[str]:
        """What is above its tolerance; nothing: the artifact is usable."""
        found = []
        if not self.compared.largest <= self.allowed:
            found.append(f"numbers differ by {self.compared.largest:.3g}; allowed are {self.allowed:.3g}")
        same, inputs = self.compared.same_text, self.compared.inputs
        if same is not None and self.dtype == "float32" and same < inputs - inputs // 100:
            found.append(f"{inputs - same} of {inputs} texts differ; without rounding they are the same")
        if self.deciding in self.before:
            value, other = self.before[self.deciding], self.after.get(self.deciding, math.nan)
            loss = (other - value) * (1 if self.better[self.deciding] == "min" else -1)
            if not (loss <= self.slack or (math.isnan(value) and math.isnan(other))):
                found.append(f"{self.deciding} goes from {value:.4f} to {other:.4f}; allowed is {self.slack:.3g}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        faults = self.faults()
        return {
            "usable": not faults,
            "faults": faults,
            "format": self.format,
            "dtype": self.dtype,
            "runtime": self.runtime,
            "data": self.data,
            "inputs": self.compared.inputs,
            "largest_difference": self.compared.largest,
            "mean_difference": self.compared.mean,
            "largest_number": self.compared.scale,
            "allowed_difference": self.allowed,
            "same_text": self.compared.same_text,
            "deciding_metric": self.deciding,
            "allowed_loss": self.slack,
            "metrics": {
                name: {"trained": value, "artifact": self.after.get(name), "better": self.better[name]}
                for name, value in self.before.items()
            },
        }


def show(report: Report) -> None:
    """Print a report as a table."""
    from rich.table import Table

    from ..common.console import console

    table = Table("parity", "trained", "artifact", "allowed", title_justify="left")
    compared = report.compared
    table.add_row("largest difference", "", f"{compared.largest:.3g}", f"{report.allowed:.3g}")
    table.add_row("mean difference", "", f"{compared.mean:.3g}", "")
    if compared.same_text is not None:
        table.add_row("same text", str(compared.inputs), str(compared.same_text), "")
    for name, value in report.before.items():
        bound = f"{report.slack:.3g} worse" if name == report.deciding else ""
        table.add_row(name, f"{value:.4f}", f"{report.after.get(name, math.nan):.4f}", bound)
    console.print(table)
