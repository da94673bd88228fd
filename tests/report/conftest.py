"""Runs as training leaves them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from luthier.common.evaluation import each
from luthier.common.evaluation.each import Each


def write_run(
    folder: Path,
    losses: Sequence[float] = (3.0, 2.0, 1.5, 1.2),
    examples: Sequence[Each] = (),
    metrics: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    learning_rate: float = 1e-4,
    torch: str = "2.14.1",
    digest: str = "ab" * 32,
) -> Path:
    """A finished run of `losses` logged steps, evaluated at its end."""
    folder.mkdir(parents=True)
    last = 10 * len(losses)
    recipe = {
        "task": {"kind": "asr.whisper"},
        "model": {"path": "tiny"},
        "optim": {"learning_rate": learning_rate},
        "checkpoint": {"best": None},
        "output": str(folder),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    data = {"validation": {"rows": 3, "kept_rows": 2, "examples": 2, "seconds": 4.5, "dropped": {"silent": 1}}}
    data["validation"]["named"] = {"silent": ["a.jsonl:3: the audio is silent"]}
    (folder / "data.json").write_text(json.dumps(data))
    record = {
        "data": {"validation": {"sha256": {"/x/a.jsonl": digest}}},
        "versions": {"python": "3.11.7", "torch": torch},
        "devices": ["cpu"],
        "command": "luthier train r.yaml",
        "seed": 0,
        "started": "2026-01-01T00:00:00+00:00",
        "position": {"step": last, "seconds": 65.0, "skipped": 0},
    }
    (folder / "run.json").write_text(json.dumps(record))
    lines = ["step,name,value", *(f"{10 * at},train/loss,{loss}" for at, loss in enumerate(losses, 1))]
    values = dict(metrics or {"wer": 0.25, "loss": 1.2, "utterances": 2, "slices": {"speaker": {"a": {"wer": 0.25}}}})
    (folder / "curves.csv").write_text("\n".join([*lines, f"{last},validation/wer,{values.get('wer', 0)}"]) + "\n")
    whole = {"step": last, "epoch": 1.0, **values}
    (folder / "metrics.json").write_text(json.dumps(whole))
    (folder / "evaluations.jsonl").write_text(json.dumps(whole) + "\n")
    if examples:
        each.write(each.place(folder, last), examples)
    if samples:
        (folder / "samples").mkdir()
        (folder / "samples" / f"step-{last:08d}.json").write_text(json.dumps(list(samples)))
    return folder


@pytest.fixture
def run_at(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run under a name; further arguments as of `write_run`."""

    def make(name: str = "run", **given: Any) -> Path:
        return write_run(tmp_path / name, **given)

    return make


@pytest.fixture
def utterances() -> Callable[..., list[Each]]:
    """Examples with so many errors each, of ten words."""

    def make(errors: Sequence[float]) -> list[Each]:
        return [
            Each(f"a.jsonl:{at}", {"wer": (float(wrong), 10.0)}, {"speaker": "ab"[at % 2]})
            for at, wrong in enumerate(errors, 1)
        ]

    return make
