"""What the page shows of runs: curves, metrics, samples."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .place import Place

POINTS = 500
"""Most points of a curve that are drawn."""

Point = tuple[int, float]


def curves(place: Place, run: str) -> dict[str, list[Point]]:
    """(optimizer step, value) of each curve of a run so far, by name."""
    file, found = place.inside(run) / "curves.csv", dict[str, list[Point]]()
    if file.is_file():
        with file.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(line for line in stream if line.endswith("\n")):  # none that is being written
                if math.isfinite(value := float(row["value"])):
                    found.setdefault(row["name"], []).append((int(row["step"]), value))
    return found


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most POINTS of them, the last one too."""
    stride = max(1, -(-len(points) // POINTS))
    return [*points[:-1:stride], *points[-1:]] if points else []


def frame(curve: Mapping[str, Sequence[Point]]) -> Any:
    """One curve of some runs, by run, as the plot takes it."""
    import pandas as pd

    rows = [
        {"step": step, "value": value, "run": run} for run, points in curve.items() for step, value in thinned(points)
    ]
    return pd.DataFrame(rows, columns=["step", "value", "run"])


def metrics(place: Place, run: str) -> dict[str, float]:
    """Those of the best checkpoint so far."""
    file = place.inside(run) / "metrics.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def samples(place: Place, run: str) -> tuple[str, list[Any]]:
    """Name and content of the newest file of samples."""
    folder = place.inside(run) / "samples"
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        return "none yet", []
    return files[-1].stem, json.loads(files[-1].read_text(encoding="utf-8"))


def samples_shown(place: Place, run: str) -> str:
    """The newest samples as HTML: each as a list of its fields."""
    when, content = samples(place, run)
    if not content:
        return "<p>no samples yet</p>"
    return f"<div class='answers'><p><b>{escape(when)}</b></p>{''.join(map(_listed, content))}</div>"


def _listed(sample: Any) -> str:
    fields = sample if isinstance(sample, Mapping) else {"": sample}
    rows = ((str(name), value if isinstance(value, str) else json.dumps(value)) for name, value in fields.items())
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in rows)}</dl>"


def left(place: Place, run: str) -> str:
    """How a run was left on which no process works: `done`, `stopped, resumable`, or `not running`."""
    file = place.inside(run) / "run.json"
    if file.is_file() and "position" in json.loads(file.read_text(encoding="utf-8")):  # written at the end
        return "done"
    return "stopped, resumable" if checkpoints(place, run) else "not running"


def checkpoints(place: Place, run: str) -> list[str]:
    """Names of the run's whole checkpoints, `best` and `last` first."""
    folder = place.inside(run) / "checkpoints"
    steps = sorted(one.name for one in folder.glob("step-*") if (one / "COMMIT").is_file()) if folder.is_dir() else []
    links = [name for name in ("best", "last") if (folder / name).exists()]
    return [*links, *steps]
