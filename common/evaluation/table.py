"""Metrics as a table, samples for reading."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..console import console, is_first_rank

SHOWN_SAMPLES = 3


def show(columns: Mapping[str, Mapping[str, Any]], samples: Sequence[Mapping[str, Any]] = ()) -> None:
    """Print metrics, one column for each evaluation, then slices of the last one and a few samples."""
    if not is_first_rank():
        return
    table = Table("metric", *(str(name) for name in columns), title_justify="left")
    last = list(columns.values())[-1]
    for name, value in last.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add_row(name, *(_number(column.get(name)) for column in columns.values()))
    console.print(table)
    _show_slices(last.get("slices") or {})
    for sample in samples[:SHOWN_SAMPLES]:
        for key, value in sample.items():
            if key == "audio":  # for ears
                continue
            value = f"a picture ({len(value)} bytes)" if isinstance(value, bytes) else value
            console.print(f"  {key:>10}: {value}", highlight=False, markup=False)
        console.print()


def _show_slices(slices: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    rows = [(f"{field} = {value}", metrics) for field, values in slices.items() for value, metrics in values.items()]
    if len(rows) < 2:
        return
    names = list(rows[0][1])
    table = Table("slice", *names)
    for label, metrics in rows:
        table.add_row(label, *(_number(metrics.get(name)) for name in names))
    console.print(table)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def show_outcome(folder: Path) -> None:
    """Print what a finished run reached: metrics before it and of its best checkpoint, samples, where it lies."""
    history = folder / "evaluations.jsonl"
    if not history.exists() or not (folder / "metrics.json").exists():
        return
    evaluations = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
    best = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    columns = {"before": evaluations[0]} if evaluations[0]["step"] == 0 else {}
    columns[f"best (step {best['step']})"] = best
    samples = folder / "samples" / f"step-{best['step']:08d}.json"
    show(columns, json.loads(samples.read_text(encoding="utf-8")) if samples.exists() else ())
    if is_first_rank():
        console.print(f"run: {folder}", highlight=False)
