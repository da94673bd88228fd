"""A training that is followed by trackers, stopped and gone on with: one record, with every step once."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from luthier.common.training.run import train


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_a_resumed_run_goes_on_with_its_record(toy: ModuleType, tmp_path: Path, monkeypatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    data = toy.write_data(tmp_path / "train.jsonl", [3, 2, 4, 3, 2, 5, 3, 2])
    changes = (f"data.validation={data}", "track.loggers=[mlflow, tensorboard]", "evaluate.every=2")
    run = toy.make(tmp_path / "run", data, *changes)
    stopped = train(run, [toy.At(1, toy.terminate)])
    assert stopped.stopped_by
    outcome = train(run)
    assert not outcome.stopped_by
    client = MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    (known,) = client.search_runs([client.get_experiment_by_name("luthier").experiment_id])
    steps = [step for step, _ in toy.curve(tmp_path / "run")]
    assert steps == [1, 2, 3, 4]
    history = client.get_metric_history(known.info.run_id, "train/loss")
    assert [(one.step, f"{one.value:.8g}") for one in history] == toy.curve(tmp_path / "run")
    assert known.data.tags["checkpoint"] == str(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert known.data.params["recipe/task.kind"] == "test.toy"
    assert known.data.params["data/train/train.jsonl/sha256"]
    (last,) = (tmp_path / "run" / "mlflow").rglob("step-00000004.json")
    assert json.loads(last.read_text())[0] == {"points": 3}
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
