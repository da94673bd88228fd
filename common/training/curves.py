"""Curves: a Lightning logger that appends to one tidy CSV, and goes on without doubling or gaps after a resume."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from ..console import is_first_rank
from ..record import write_text

HEADER = ("step", "name", "value")


class CsvCurves(Logger):
    """Rows `step,name,value`, written as they come.

    Args:
        file: the CSV.
        start: optimizer steps done when the run begins; rows of later steps, left by a run that was killed after its
            last checkpoint, are removed.
    """

    def __init__(self, file: Path, start: int):
        super().__init__()
        self.file = file
        if is_first_rank():
            rows = [row for row in read(file) if int(row["step"]) <= start] if start else []
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, HEADER)
            writer.writeheader()
            writer.writerows(rows)
            write_text(file, text.getvalue())  # at once: a kill must not lose the curve so far

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        with self.file.open("a", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows((step, name, f"{value:.8g}") for name, value in metrics.items())

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """The resolved recipe lies beside the curves."""


def read(file: Path) -> list[dict[str, str]]:
    """The rows of a curves file; none if there is no file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return [row for row in csv.DictReader(stream) if row["value"]]
