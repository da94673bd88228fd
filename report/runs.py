"""What a run has left in its folder."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ..common.errors import LuthierError
from ..common.evaluation import each
from ..common.secrets import command_without_secrets, without_secrets

Curve = list[tuple[int, float]]
"""(optimizer step, value)"""


@dataclass(frozen=True)
class Run:
    """A run, finished or not.

    Args:
        name: as it is called beside others.
        folder: its output.
    """

    name: str
    folder: Path

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, without secrets."""
        found = without_secrets(yaml.safe_load((self.folder / "recipe.yaml").read_text(encoding="utf-8")))
        return found if isinstance(found, dict) else {}

    @cached_property
    def record(self) -> dict[str, Any]:
        """The run record, without secrets."""
        found = without_secrets(self._json("run.json"))
        return {**found, "command": command_without_secrets(str(found.get("command", "")))}

    @cached_property
    def data(self) -> dict[str, Any]:
        """What became of the rows of each data set, with their hashes where they are known."""
        known = self.record.get("data") or {}
        return {name: {**known.get(name, {}), **facts} for name, facts in self._json("data.json").items()}

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Those of the best checkpoint."""
        return self._json("metrics.json")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        return self._lines("evaluations.jsonl")

    @cached_property
    def skipped(self) -> list[dict[str, Any]]:
        """Steps that went wrong."""
        return self._lines("skipped.jsonl")

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """By name, in the order of their first point; values that are not finite are left out."""
        file, found = self.folder / "curves.csv", dict[str, Curve]()
        if file.is_file():
            with file.open(newline="", encoding="utf-8") as stream:
                for row in csv.DictReader(stream):
                    if row["value"] and math.isfinite(value := float(row["value"])):
                        found.setdefault(row["name"], []).append((int(row["step"]), value))
        return found

    @property
    def step(self) -> int | None:
        """Optimizer steps at the best checkpoint."""
        return self.metrics.get("step")

    @cached_property
    def best(self) -> str | None:
        """Name of the metric that decides which checkpoint is best."""
        asked = (self.recipe.get("checkpoint") or {}).get("best")
        return asked or next(iter(plain(self.metrics)), None)

    @cached_property
    def examples(self) -> each.Table | None:
        """What each example adds to the metrics of the best checkpoint; older runs have not kept it."""
        return None if self.step is None else each.read(each.place(self.folder, self.step))

    @cached_property
    def samples(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """(step, samples) of each evaluation that kept some."""
        files = sorted((self.folder / "samples").glob("step-*.json"))
        return [(int(file.stem.removeprefix("step-")), json.loads(file.read_text(encoding="utf-8"))) for file in files]

    def _json(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return found

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def plain(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, without where they were measured."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "epoch")
    }


def read(folder: Path, name: str | None = None) -> Run:
    """The run of a folder.

    Raises:
        LuthierError: there is none.
    """
    if not (folder / "recipe.yaml").is_file() or (folder / "COMMIT").is_file():
        raise LuthierError(
            "no run", where=folder, expected="the output folder of a run, which holds recipe.yaml and curves.csv"
        )
    return Run(name or folder.resolve().name, folder)


def read_all(folders: Sequence[Path]) -> list[Run]:
    """Runs that are called by the end of their paths, as much of it as tells them apart."""
    paths, parts = [folder.resolve() for folder in folders], 2
    while parts < 9 and len({path.parts[-parts:] for path in paths}) < len(set(paths)):
        parts += 1
    return [read(folder, "/".join(path.parts[-parts:])) for folder, path in zip(folders, paths, strict=True)]


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """The values of nested mappings by their paths, such as `data.batch.examples`."""
    if isinstance(tree, dict) and tree:
        return {k: v for name, value in tree.items() for k, v in leaves(value, f"{path}.{name}".lstrip(".")).items()}
    return {path: tree}


def differing(trees: Sequence[Any]) -> dict[str, list[Any]]:
    """The values that are not the same in all of some nested mappings, by path; None where one has no such value."""
    flat = [leaves(tree) for tree in trees]
    paths = dict.fromkeys(path for one in flat for path in one)
    found = {path: [one.get(path) for one in flat] for path in paths}
    return {path: values for path, values in found.items() if any(value != values[0] for value in values)}
