"""Each tracker that can work without a network: what it is told, that a resumed run goes on with its record, that no
secret gets there, and that it ends no training."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from luthier.common.errors import LuthierError
from luthier.common.recipe import TrackSection
from luthier.common.trackers import choose
from luthier.common.trackers.base import Tracker, begin, facts, record_id, tell

RECORD = {
    "recipe": {
        "task": {"kind": "test.toy"},
        "optim": {"learning_rate": 0.1},
        "model": {"path": "https://me:hunter2@host/model", "hub_token": "hunter2"},
    },
    "data": {"train": {"rows": 3, "examples": 2, "sha256": {"/x/a b.jsonl": "ab" * 32, "/y/a b.jsonl": "12" * 32}}},
    "model": {"path": "x", "sha256": "cd" * 32},
    "versions": {"torch": "2"},
    "git": {"commit": "ef", "dirty": False},
}
SAMPLES = [{"where": "a:1", "answer": "four | 4\n", "reward": 0.5}, {"where": "a:2", "note": "only here"}]


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def recipe(name: str) -> Any:
    return SimpleNamespace(track=TrackSection(loggers=("csv", name), project="here", name="run one"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, float], Path]:
    """A start of a run, told of everything: gives its folder."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "runs" / "one"
    output.mkdir(parents=True)

    def start(name: str, step: int, loss: float) -> Path:
        made = choose.loggers(recipe(name), output, step)
        assert [isinstance(logger, Tracker) for logger in made] == [False, True]
        begin(made, RECORD)
        tell(made, lambda logger: logger.log_metrics({"train/loss": loss}, step + 1))
        tell(made, lambda logger: logger.log_samples(SAMPLES, step + 1), Tracker)
        tell(made, lambda logger: logger.log_checkpoint(output / "checkpoints" / f"step-{step + 1}", step + 1), Tracker)
        for logger in made:
            logger.finalize("success")
        return output

    return start


def test_what_a_run_is_made_of_has_no_secrets() -> None:
    found = facts(RECORD)
    assert found["recipe/optim.learning_rate"] == "0.1"
    assert found["data/train/a b.jsonl/sha256"] == "ab" * 32
    assert found["data/train/a b.jsonl/sha256 (2)"] == "12" * 32, "files of one name in two folders"
    assert found["data/train/rows"] == "3"
    assert found["model/sha256"] == "cd" * 32
    assert found["git/commit"] == "ef"
    assert "hunter2" not in json.dumps(found)


def test_the_name_of_a_record_is_new_until_it_is_kept(tmp_path: Path) -> None:
    first, there = record_id(tmp_path, "wandb")
    assert not there
    assert first != record_id(tmp_path, "wandb")[0]


@needs("tensorboard")
def test_tensorboard(run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("tensorboard", 0, 2.0)
    folder = run("tensorboard", 4, 1.5) / "tensorboard"
    assert b"hunter2" not in b"".join(file.read_bytes() for file in folder.iterdir())
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    assert [(one.step, one.value) for one in events.Scalars("train/loss")] == [(1, 2.0), (5, 1.5)]
    told = [one.tensor_proto.string_val[0].decode() for one in events.Tensors("samples/0/text_summary")]
    assert told[-1].startswith("**where** a:1\n\n**answer** four \\| 4 ⏎")
    assert "step-5" in events.Tensors("checkpoint/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "ab" * 32 in events.Tensors("run/text_summary")[-1].tensor_proto.string_val[0].decode()


@needs("mlflow")
@needs("sqlalchemy")
def test_mlflow(run) -> None:
    from mlflow.tracking import MlflowClient

    run("mlflow", 0, 2.0)
    output = run("mlflow", 4, 1.5)
    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    (known,) = client.search_runs([client.get_experiment_by_name("here").experiment_id])
    assert known.info.run_id == json.loads((output / "trackers.json").read_text())["mlflow"], (
        "one record of both starts"
    )
    assert known.info.run_name == "run one"
    assert known.info.status == "FINISHED"
    history = client.get_metric_history(known.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.0), (5, 1.5)]
    assert known.data.params["recipe/optim.learning_rate"] == "0.1"
    assert known.data.params["data/train/a b.jsonl/sha256"] == "ab" * 32
    assert known.data.tags["checkpoint"].endswith("step-5")
    assert "hunter2" not in json.dumps(known.data.to_dictionary())
    kept = sorted(file.name for file in (output / "mlflow").rglob("*.json"))
    assert kept == ["run.json", "step-00000001.json", "step-00000005.json"]
    assert "hunter2" not in next((output / "mlflow").rglob("run.json")).read_text()
    assert [path.name for path in output.parent.parent.iterdir()] == ["runs"], "nothing beside the run's folder"


@needs("wandb")
def test_wandb_offline(run) -> None:
    import wandb

    for step, loss in ((0, 2.0), (4, 1.5)):  # each in a process of its own: the service ends, and all is written
        output = run("wandb", step, loss)
        assert wandb.run is None, "closed with the training"
        wandb.teardown()
    name = json.loads((output / "trackers.json").read_text())["wandb"]
    files = sorted((output / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.stem for file in files] == [f"run-{name}"] * 2, "both starts have one name"
    records = list(written(files[-1]))
    assert {one.run.run_id for one in records if one.HasField("run")} == {name}
    config = {item.key: json.loads(item.value_json) for one in records for item in one.config.update}
    assert config["recipe/optim.learning_rate"] == "0.1"
    assert config["data/train/a b.jsonl/sha256"] == "ab" * 32
    points = [
        {".".join(i.nested_key): i.value_json for i in one.history.item} for one in records if one.HasField("history")
    ]
    assert [(one["trainer/global_step"], one["train/loss"]) for one in points if "train/loss" in one] == [("5", "1.5")]
    assert [(one["samples.nrows"], one["samples.ncols"]) for one in points if "samples.nrows" in one] == [("2", "4")]
    summary = {item.key: item.value_json for one in records for item in one.summary.update}
    assert json.loads(summary["checkpoint"]).endswith("step-5")
    everything = b"".join(file.read_bytes() for file in (output / "wandb").rglob("*") if file.is_file())
    assert b"hunter2" not in everything


def written(file: Path) -> Iterator[Any]:
    """The records of an offline run of W&B: protocol buffers in LevelDB's log format, blocks of 32 KiB of pieces with a
    head of 7 bytes (checksum, length, and whether it is 1 whole, 2 the first, 3 a middle, 4 the last)."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@needs("trackio")
def test_trackio(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    for name in list(sys.modules):  # it reads where its database is when it is imported
        if name.partition(".")[0] == "trackio" or name.endswith(".trackio_logger"):
            monkeypatch.delitem(sys.modules, name)
    run("trackio", 0, 2.0)
    output = run("trackio", 4, 1.5)
    from trackio.sqlite_storage import SQLiteStorage

    (known,) = SQLiteStorage.get_runs("here")
    assert known == json.loads((output / "trackers.json").read_text())["trackio"], "one record of both starts"
    assert known.startswith("run one-")
    rows = SQLiteStorage.get_logs("here", known)
    assert [(one["step"], one["train/loss"]) for one in rows if "train/loss" in one] == [(1, 2.0), (5, 1.5)]
    tables = [one["samples"] for one in rows if "samples" in one]
    assert [row["where"] for row in tables[-1]["_value"]] == ["a:1", "a:2"]
    assert [one["checkpoint"][-6:] for one in rows if "checkpoint" in one] == ["step-1", "step-5"]
    config = SQLiteStorage.get_run_config("here", known)
    assert config["recipe/optim.learning_rate"] == "0.1"
    assert config["data/train/a b.jsonl/sha256"] == "ab" * 32
    everything = b"".join(file.read_bytes() for file in (tmp_path / "trackio").rglob("*") if file.is_file())
    assert b"a b.jsonl" in everything
    assert b"hunter2" not in everything


class Fails:
    """A tracker whose service is away."""

    def begin(self, facts: Any) -> None:
        raise ConnectionError("no route to host")

    log_metrics = log_samples = log_checkpoint = begin


def test_a_tracker_that_can_t_be_opened_is_told_before_the_first_step() -> None:
    with pytest.raises(LuthierError, match="no route to host") as caught:
        begin([Fails()], RECORD)
    assert "Fails" in str(caught.value)


def test_a_tracker_that_fails_later_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("luthier")
    before, logger.propagate = logger.propagate, True
    try:
        tell([Fails()], lambda one: one.log_metrics({}))
    finally:
        logger.propagate = before
    assert "Fails could not be told: no route to host" in caplog.text


@pytest.mark.parametrize(("name", "extra"), [("swanlab", "swanlab"), ("trackio", "trackio"), ("wandb", "wandb")])
def test_a_missing_package_names_its_extra(name: str, extra: str, tmp_path: Path, monkeypatch) -> None:
    if name == "wandb":
        from luthier.common.trackers import services

        def absent(*_: Any, **__: Any) -> None:
            raise ModuleNotFoundError("No module named 'wandb'")

        monkeypatch.setattr(services, "Wandb", absent)
    elif importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(LuthierError, match=rf"'{name}' is not installed") as caught:
        choose.loggers(recipe(name), tmp_path, 0)
    assert f"luthier[{extra}]" in str(caught.value)
