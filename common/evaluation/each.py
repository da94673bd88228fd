"""What each example of an evaluation adds to its metrics, so that the error of a metric can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "evaluations"
OF, SLICE = "/of", "slice/"

Part = tuple[float, float]
"""(numerator, denominator): errors and words, summed loss and tokens, a score and 1."""


@dataclass(frozen=True)
class Each:
    """One example. A metric of any set of them is the sum of their numerators divided by that of their denominators.

    Args:
        where: place of the row.
        parts: of each metric.
        fields: what it may be sliced by.
    """

    where: str
    parts: Mapping[str, Part]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def named(self, prefix: str) -> Each:
        """The same under other names."""
        parts = {f"{prefix}/{name}": part for name, part in self.parts.items()}
        return replace(self, parts=parts, fields={f"{prefix}/{name}": value for name, value in self.fields.items()})


def place(output: Path, step: int) -> Path:
    """Where a run keeps the examples of the evaluation after so many steps."""
    return output / FOLDER / f"step-{step:08d}.parquet"


def write(file: Path, examples: Sequence[Each]) -> None:
    """Write examples as Parquet: `where`, a numerator `wer` and a denominator `wer/of` for each metric, `slice/...`."""
    import pyarrow as pa
    from pyarrow import parquet

    columns: dict[str, Any] = {"where": pa.array([one.where for one in examples], pa.string())}
    for name in dict.fromkeys(name for one in examples for name in one.parts):
        pairs = [one.parts.get(name, (None, None)) for one in examples]
        columns[name], columns[name + OF] = (pa.array(part, pa.float64()) for part in zip(*pairs, strict=True))
    for name in dict.fromkeys(name for one in examples for name in one.fields):
        values = [one.fields.get(name) for one in examples]
        columns[SLICE + name] = pa.array([None if value is None else str(value) for value in values], pa.string())
    file.parent.mkdir(exist_ok=True)
    new = file.with_suffix(".new")
    parquet.write_table(pa.table(columns), new, compression="zstd")
    new.replace(file)


@dataclass(frozen=True)
class Table:
    """The examples of an evaluation, column by column.

    Args:
        where: [N] place of each row.
        parts: of each metric, [N] numerators and [N] denominators; NaN where an example has no part in it.
        fields: of each slice, [N] values, None where an example has none.
    """

    where: list[str]
    parts: dict[str, tuple[np.ndarray, np.ndarray]]
    fields: dict[str, list[str | None]]


def read(file: Path) -> Table | None:
    """What `write` wrote; None if there is no such file."""
    if not file.is_file():
        return None
    from pyarrow import parquet

    table = parquet.read_table(file)
    columns = {name: table.column(name) for name in table.column_names}

    def numbers(name: str) -> np.ndarray:
        return np.asarray(columns[name].to_numpy(zero_copy_only=False), dtype=float)

    names = [name.removesuffix(OF) for name in columns if name.endswith(OF)]
    slices = [name for name in columns if name.startswith(SLICE)]
    return Table(
        columns["where"].to_pylist(),
        {name: (numbers(name), numbers(name + OF)) for name in names},
        {name.removeprefix(SLICE): columns[name].to_pylist() for name in slices},
    )
