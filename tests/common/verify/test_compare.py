"""Two runs are the same only if every bit that counts is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from luthier.common.verify.compare import Difference, checkpoints_differ, curves_differ

NAN = math.nan


def state(**changes: Any) -> dict[str, Any]:
    return {
        "global_step": 3,
        "state_dict": {"w": torch.tensor([1.0, -2.0]), "n": torch.tensor(4)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.tensor([0.5])}}, "lr": 0.1}],
        "callbacks": {"AfterStep": {"step": 7, "seconds": 1.5, "best": None}},
    } | changes


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def made(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        (folder / "state").mkdir()
        save_file({"w": changes.pop("weights", torch.tensor([1.0, -2.0]))}, folder / "model" / "model.safetensors")
        (folder / "model" / "config.json").write_text(changes.pop("config", "{}"))
        torch.save(state(**changes), folder / "state" / "trainer.pt")
        return folder

    return made


@pytest.mark.parametrize(
    ("changes", "where", "size"),
    [
        # 2 -> 2 + 2^-22, the next float32: 2^-22 / (2 + 2^-22), which as a double is just below 2^-23
        ({"weights": torch.tensor([1.0, -2.0 - 2**-22])}, "model/model.safetensors: w", 2**-22 / (2 + 2**-22)),
        ({"config": "{} "}, "model/config.json", math.inf),
        ({"state_dict": {"w": torch.tensor([1.0, -4.0]), "n": torch.tensor(4)}}, "state/trainer.pt: state_dict.w", 0.5),
        ({"state_dict": {"w": torch.tensor([1.0, -2.0])}}, "state/trainer.pt: state_dict", math.inf),
        (
            {"optimizer_states": [{"state": {0: {"exp_avg": torch.tensor([0.5])}}, "lr": 0.2}]},
            "state/trainer.pt: optimizer_states[0].lr",
            0.5,
        ),
        (
            {"optimizer_states": [{"state": {0: {"exp_avg": torch.tensor([NAN])}}, "lr": 0.1}]},
            "state/trainer.pt: optimizer_states[0].state.0.exp_avg",
            math.inf,
        ),
        (
            {"callbacks": {"AfterStep": {"step": 7, "seconds": 1.5, "best": 3}}},
            "state/trainer.pt: callbacks.AfterStep.best",
            math.inf,
        ),
    ],
)
def test_a_difference_is_found_and_named(
    write: Callable[..., Path], changes: dict[str, Any], where: str, size: float
) -> None:
    assert checkpoints_differ(write("one"), write("other", **changes)) == [Difference(where, size)]


def test_what_the_clock_and_the_sitting_give_is_not_compared(write: Callable[..., Path]) -> None:
    other = {"global_step": 1, "callbacks": {"AfterStep": {"step": 7, "seconds": 9.0, "best": None}}}
    assert not checkpoints_differ(write("one"), write("other", **other))


def test_a_stream_is_compared_by_its_rows(write: Callable[..., Path]) -> None:
    def at(state: str, row: int) -> dict[str, Any]:
        source = {"start": [state, 3, row], "skip": 1, "taken": row}
        return {"callbacks": {"AfterStep": {"stream": {"window": 1, "sources": [source]}}}}

    one = write("one", **at("one state", 4))
    assert not checkpoints_differ(one, write("same", **at("another of the same row", 4)))
    assert [found.where for found in checkpoints_differ(one, write("other", **at("one state", 5)))] == [
        "state/trainer.pt: callbacks.AfterStep.stream.sources[0].start[2]",
        "state/trainer.pt: callbacks.AfterStep.stream.sources[0].taken",
    ]


def test_a_missing_file_is_a_difference(write: Callable[..., Path]) -> None:
    one, other = write("one"), write("other")
    (other / "model" / "config.json").unlink()
    assert checkpoints_differ(one, other) == [Difference("model/config.json", math.inf)]


def test_not_a_number_is_equal_to_itself(write: Callable[..., Path]) -> None:
    weights = {"w": torch.tensor([NAN, 1.0]), "n": torch.tensor(1)}
    assert not checkpoints_differ(write("one", state_dict=weights), write("other", state_dict=weights))


def test_a_sharded_state_is_compared_tensor_by_tensor(tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    for name, value in (("one", 2.0), ("same", 2.0), ("other", 4.0)):
        (tmp_path / name / "model").mkdir(parents=True)
        content = {"w": torch.tensor([1.0, value]), "v": torch.ones(3)}
        checkpoint.save(content, checkpoint_id=tmp_path / name / "state" / "shards", no_dist=True)
    assert not checkpoints_differ(tmp_path / "one", tmp_path / "same")
    found = checkpoints_differ(tmp_path / "one", tmp_path / "other")
    assert found == [Difference("state/shards/.metadata: w", 0.5)]


def curve(folder: Path, *rows: str) -> Path:
    folder.mkdir()
    (folder / "curves.csv").write_text("\n".join(("step,name,value", *rows)) + "\n")
    return folder


def test_curves(tmp_path: Path) -> None:
    one = curve(tmp_path / "one", "1,train/loss,2", "1,train/items_per_second,7", "2,train/loss,1", "3,train/loss,0.5")
    same = curve(
        tmp_path / "same", "1,train/loss,2", "1,train/items_per_second,9", "2,train/loss,1", "3,train/loss,0.5"
    )
    assert not curves_differ(one, same)
    doubled = curve(tmp_path / "doubled", "1,train/loss,2", "2,train/loss,1", "2,train/loss,1", "3,train/loss,0.25")
    first, second = curves_differ(one, doubled)
    assert first == Difference("curves.csv: train/loss at step 2", math.inf)
    assert second == Difference("curves.csv: train/loss at step 3", 0.5)
    missing = curve(tmp_path / "missing", "1,train/loss,2", "3,train/loss,0.5")
    assert curves_differ(one, missing) == [Difference("curves.csv: train/loss at step 2", math.inf)]
