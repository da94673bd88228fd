"""The tables of a page: metrics with how sure they are, by slice; data; what differs between runs; artifacts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common.checkpoint.directory import MANIFEST, sha256
from ..common.evaluation.each import Table
from ..common.secrets import distinct
from .intervals import intervals
from .runs import Run, differing, plain

COUNTS = ("utterances", "words", "tokens", "answers", "pictures", "pairs", "count", "examples")
"""What says how much a metric is of: it has no error."""


@dataclass(frozen=True)
class Cell:
    """A metric of one run, and its bounds where they are known."""

    value: float | None
    bounds: tuple[float, float] | None = None


Rows = list[tuple[str, list[Cell]]]


def metrics(runs: Sequence[Run]) -> Rows:
    """The metrics of the best checkpoint of each run."""
    bounds = [intervals(run.examples.parts) if run.examples is not None else {} for run in runs]
    names = dict.fromkeys(name for run in runs for name in plain(run.metrics))
    return [
        (name, [Cell(plain(run.metrics).get(name), own.get(name)) for run, own in zip(runs, bounds, strict=True)])
        for name in names
    ]


@dataclass(frozen=True)
class Sliced:
    """The metrics of one run by the values of a field."""

    run: Run
    field: str
    names: list[str]
    rows: Rows


def slices(runs: Sequence[Run]) -> list[Sliced]:
    """Those of each run."""
    return [
        _sliced(run, field, values)
        for run in runs
        for field, values in (run.metrics.get("slices") or {}).items()
        if values
    ]


def _sliced(run: Run, field: str, values: dict[str, dict[str, Any]]) -> Sliced:
    names = list(dict.fromkeys(name for found in values.values() for name in plain(found)))
    rows: Rows = []
    for value, found in values.items():
        bounds = intervals(_chosen(run.examples, field, value)) if run.examples is not None else {}
        rows.append((value, [Cell(plain(found).get(name), bounds.get(name)) for name in names]))
    return Sliced(run, field, names, rows)


def _chosen(examples: Table, field: str, value: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The parts of the examples that have a value of a field."""
    if field not in examples.fields:
        return {}
    mine = np.array([own == value for own in examples.fields[field]], dtype=bool)
    return {name: (part[0][mine], part[1][mine]) for name, part in examples.parts.items()} if mine.any() else {}


def recipe_diff(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs, but for where they write."""
    found = differing([run.recipe for run in runs])
    return {path: values for path, values in found.items() if path != "output"}


def versions(runs: Sequence[Run]) -> list[tuple[str, list[Any], bool]]:
    """(package, version in each run, whether they differ)."""
    trees = [run.record.get("versions") or {} for run in runs]
    names = dict.fromkeys(name for tree in trees for name in tree)
    rows = [(name, [tree.get(name) for tree in trees]) for name in names]
    return [(name, values, any(value != values[0] for value in values)) for name, values in rows]


def hashes(run: Run) -> dict[str, str | None]:
    """SHA-256 of each file of data, by set and name, and of the base model."""
    found = distinct(
        (f"{name}: {Path(path).name}", digest)
        for name, facts in (run.record.get("data") or {}).items()
        for path, digest in (facts.get("sha256") or {}).items()
    )
    model = run.record.get("model") or {}
    return {**found, "model": model.get("sha256") or model.get("path")}


def parities(run: Run, given: Iterable[Path] = ()) -> list[tuple[str, dict[str, Any]]]:
    """(folder, parity report) of the artifacts that were made of a run's checkpoints: those in its folder or beside it,
    and of the given ones."""
    manifests = {sha256(file) for file in (run.folder / "checkpoints").glob(f"step-*/{MANIFEST}")}
    found = []
    near = [*run.folder.glob("*/artifact.json"), *run.folder.resolve().parent.glob("*/artifact.json")]
    for file in dict.fromkeys([*(file.resolve() for file in near), *(folder / "artifact.json" for folder in given)]):
        report = file.with_name("parity.json")
        if not file.is_file() or not report.is_file():
            continue
        made_of = (json.loads(file.read_text(encoding="utf-8")).get("checkpoint") or {}).get("manifest_sha256")
        if made_of in manifests:
            found.append((file.parent.name, json.loads(report.read_text(encoding="utf-8"))))
    return found
