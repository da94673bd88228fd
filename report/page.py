"""`luthier report`: the page of one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..common.console import duration
from ..common.pages.media import Media
from ..common.pages.render import render
from ..common.record import write_text
from . import tables
from .runs import Curve, Run, read_all
from .samples import samples

POINTS = 1200
"""Points of a curve on a page; of a longer one each is the mean of several."""
FIRST = ("train/loss", "train/reward", "validation/loss", "train/learning_rate", "train/gradient_norm")
"""Curves that are shown at once, with the deciding metric; the others are folded away."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 4", "14 3 2 3 2 3")


def write(folders: Sequence[Path], output: Path, artifacts: Sequence[Path] = ()) -> None:
    """Write the page of some runs.

    Args:
        folders: their outputs.
        output: the HTML file; one that is there is replaced.
        artifacts: exported artifacts that lie neither in the runs' folders nor beside them.

    Raises:
        LuthierError: a folder holds no run.
    """
    runs, media = read_all(folders), Media()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, render("report.html", facts(runs, media, artifacts), Path(__file__).parent / "templates"))


def facts(runs: Sequence[Run], media: Media, artifacts: Sequence[Path] = ()) -> dict[str, Any]:
    """What the template shows."""
    shown = {run.name: samples(run, media) for run in runs}
    return {
        "title": f"Luthier: {', '.join(run.name for run in runs)}",
        "runs": runs,
        "heads": [_head(run) for run in runs],
        "curves": _curves(runs),
        "metrics": tables.metrics(runs),
        "slices": tables.slices(runs),
        "without_examples": [run.name for run in runs if run.metrics and run.examples is None],
        "samples": {name: kept for name, kept in shown.items() if kept},
        "media": media,
        "recipe_diff": tables.recipe_diff(runs),
        "recipes": {run.name: yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True) for run in runs},
        "versions": tables.versions(runs),
        "hashes": {run.name: tables.hashes(run) for run in runs},
        "parities": {run.name: tables.parities(run, artifacts) for run in runs},
        "colors": 8,
        "dashes": DASHES,
    }


def _head(run: Run) -> dict[str, Any]:
    """A run in a few facts."""
    record, position = run.record, run.record.get("position") or {}
    last = max((points[-1][0] for points in run.curves.values()), default=0)
    git = record.get("git") or {}
    known = {
        "kind": (run.recipe.get("task") or {}).get("kind"),
        "model": (run.recipe.get("model") or {}).get("path"),
        "state": "finished" if position else f"not finished, or stopped; last logged step {last}",
        "steps": position.get("step"),
        "training time": duration(position["seconds"]) if position.get("seconds") else None,
        "best": f"{run.best} {run.metrics[run.best]:.4g} at step {run.step}" if run.best in run.metrics else None,
        "steps left out": position.get("skipped") or None,
        "started": record.get("started"),
        "devices": ", ".join(record.get("devices") or []),
        "seed": record.get("seed"),
        "git": f"{git.get('commit', '')[:12]}{', with changes' if git.get('dirty') else ''}" if git else None,
        "command": record.get("command"),
    }
    return {name: value for name, value in known.items() if value not in (None, "")}


def _curves(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page draws: names of curves, and the points of each run."""
    names = [name for name in dict.fromkeys(name for run in runs for name in run.curves) if not _is_count(name)]
    best = [f"validation/{run.best}" if "/" not in str(run.best) else str(run.best) for run in runs]
    first = [name for name in dict.fromkeys([*FIRST[:1], *best, *FIRST[1:]]) if name in names]
    return {
        "runs": [run.name for run in runs],
        "first": first,
        "more": [name for name in names if name not in first],
        "points": {name: [thinned(run.curves.get(name, [])) for run in runs] for name in names},
        "dashes": DASHES,
    }


def _is_count(name: str) -> bool:
    """Whether a curve says how much was done rather than how well."""
    return name == "train/epoch" or name.removeprefix("validation/") in tables.COUNTS


def thinned(curve: Curve, most: int = POINTS) -> Curve:
    """At most so many points, each the mean of equally many."""
    size = -(-len(curve) // most)
    if size <= 1:
        return curve
    parts = [curve[at : at + size] for at in range(0, len(curve), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
