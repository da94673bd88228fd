"""The checklist, and what it says of the toy task: kinds of answers, JSON, memory, disk, what can not be repeated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from luthier.common.check import check, environment, model, training
from luthier.common.check.checklist import QUESTIONS, Checklist, NotApplicable
from luthier.common.errors import DataError, LuthierError


def answers(toy: Any, tmp_path: Path, *overrides: str, lengths: tuple[int, ...] = (1, 6, 2, 5, 3, 4)) -> dict[str, Any]:
    """By name, of the fast check of a small training."""
    file = toy.write_data(tmp_path / "train.jsonl", lengths)
    held = toy.write_data(tmp_path / "validation.jsonl", (2, 3), seed=9)
    recipe = toy.make(tmp_path / "run", file, f"data.validation={held}", *overrides)
    passed = check(recipe, True, tmp_path / "check.json")
    found = json.loads((tmp_path / "check.json").read_text())
    every = [answer for question in found["questions"] for answer in question["answers"]]
    assert passed == found["passed"] == all(answer["state"] != "fail" for answer in every)
    assert not (tmp_path / "run").exists()
    return {answer["name"]: answer for answer in every}


def test_each_question_has_an_answer_and_each_failure_a_next_step(toy, tmp_path: Path) -> None:
    answers(toy, tmp_path)
    found = json.loads((tmp_path / "check.json").read_text())
    assert [question["question"] for question in found["questions"]] == list(QUESTIONS)
    assert len(QUESTIONS) == 10
    assert all(question["answers"] for question in found["questions"])
    assert found["passed"]


def test_a_failure_leaves_the_later_questions_open(toy, tmp_path: Path) -> None:
    file = toy.write_data(tmp_path / "train.jsonl", (1, 2), {0: "bad", 1: "bad"})
    assert not check(toy.make(tmp_path / "run", file), True, tmp_path / "check.json")
    found = {one["question"]: one for one in json.loads((tmp_path / "check.json").read_text())["questions"]}
    assert found["data"]["state"] == "fail"
    assert "2 marked" in found["data"]["answers"][0]["found"]
    assert found["training"]["state"] == "n/a"
    assert "'data.train' failed" in found["training"]["answers"][0]["found"]


def test_a_step_passes_fails_or_does_not_apply() -> None:
    checklist = Checklist()

    def fails() -> tuple[None, str]:
        raise DataError("rows are missing", where="data.train", given="0", do="add some")

    def breaks() -> tuple[None, str]:
        raise ZeroDivisionError("division by zero\nand more")

    def nothing() -> tuple[None, str]:
        raise NotApplicable("there is no adapter", "set model.lora")

    assert checklist.ask("data", "rows", lambda: (3, "3 rows")) == 3
    assert checklist.passed
    assert checklist.ask("export", "merged", nothing) is None
    assert checklist.passed, "what does not apply is no failure"
    assert checklist.ask("data", "more", fails) is None
    assert checklist.ask("model", "loads", breaks) is None
    states = [(one.state, one.found, one.do) for one in checklist.answers]
    assert states[1:3] == [
        ("n/a", "there is no adapter", "set model.lora"),
        ("fail", "data.train: rows are missing\n  given:    0", "add some"),
    ]
    assert states[3][:2] == ("fail", "ZeroDivisionError: division by zero")
    assert states[3][2], "what to do is said of a library's error too"
    assert [checklist.state(name) for name in ("data", "export", "model")] == ["fail", "n/a", "fail"]


def test_everything_frozen_is_found(toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(toy.Net):  # type: ignore[misc,name-defined]
        def __init__(self, section: Any) -> None:
            super().__init__(section)
            self.requires_grad_(False)

    monkeypatch.setattr(toy, "Net", Frozen)
    assert "every parameter is frozen" in answers(toy, tmp_path)["model"]["found"]


def test_a_loss_that_reaches_nothing_is_found(toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = toy.squared_error

    def cut(net: Any, data: Any) -> tuple[torch.Tensor, float]:
        total, count = whole(net, data)
        return total.detach() + 0.0 * sum(parameter.sum() for parameter in net.parameters()), count

    monkeypatch.setattr(toy, "squared_error", cut)
    found = answers(toy, tmp_path)["one step on the largest batch"]
    assert "the loss reaches nothing that is trained" in found["found"]


def test_a_batch_without_loss_and_one_of_nan_are_found(toy, tmp_path: Path) -> None:
    for trouble, said in (("empty", "nothing in the batch carries loss"), ("nan", "loss or gradient is not finite")):
        file = toy.write_data(tmp_path / "train.jsonl", (3, 3), {0: trouble, 1: trouble})
        check(toy.make(tmp_path / "run", file), True, tmp_path / "check.json")
        assert said in (tmp_path / "check.json").read_text()


def test_a_learning_rate_that_is_too_high_is_found(toy, tmp_path: Path) -> None:
    found = answers(toy, tmp_path, "optim.learning_rate=3")["one batch, repeated"]
    assert found["state"] == "fail"
    assert "lower the learning rate" in found["do"]


def judged(losses: list[float], precision: str = "32", need_not_fall: str = "") -> str:
    recipe = SimpleNamespace(train=SimpleNamespace(precision=precision))
    task: Any = SimpleNamespace(need_not_fall=need_not_fall, recipe=recipe)
    return training._judged(task, losses, [1e-6])


def test_rounding_is_not_taken_for_a_loss_that_rises() -> None:
    """bf16 has 8 places: 3.700 and 3.701 are the same number to it; a loss that stays equal has not been trained."""
    rising = [3.700, 3.7005, 3.701]
    assert "less than bf16-mixed can tell" in judged(rising, "bf16-mixed")
    for losses, precision, said in (
        (rising, "32", "rises"),
        ([3.70, 3.72, 3.75], "bf16-mixed", "rises"),
        ([3.70, 3.70, 3.70], "bf16-mixed", "does not move"),
    ):
        with pytest.raises(LuthierError, match=said):
            judged(losses, precision)
    assert "it need not fall: so it is" in judged([3.70, 3.75], need_not_fall="so it is")


def test_too_little_memory_is_found_before_the_model_is_loaded(
    toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"0" * 2000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=1000))
    found = answers(toy, tmp_path, f"model.path={model}")
    assert "not enough memory for the weights" in found["room for the weights"]["found"]
    assert "model" not in found, "the model has not been loaded"


def test_weights_that_lie_there_twice_count_once_and_those_in_four_bits_a_quarter(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 30), ("b.safetensors", 10), ("pytorch_model.bin", 40)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size * 10**6)  # takes no room
    for quantization, size in (("none", "0.04 GB"), ("nf4", "0.01 GB")):
        section = SimpleNamespace(path=str(tmp_path), quantization=quantization)
        recipe: Any = SimpleNamespace(model=section, train=SimpleNamespace(accelerator="cpu"))
        subject: Any = SimpleNamespace(recipe=recipe)
        assert f"{size} of weights" in model.fits(subject)[1]


def test_memory_is_not_judged_where_the_short_training_did_not_run(
    toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(subject: Any) -> None:
        raise torch.OutOfMemoryError("no room for the optimizer")

    monkeypatch.setattr(training, "repeated", fails)
    found = answers(toy, tmp_path)
    assert found["one batch, repeated"]["state"] == "fail"
    assert found["memory"]["state"] == "n/a"


def test_too_little_disk_is_found(toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert "not enough room for the checkpoints" in answers(toy, tmp_path)["disk"]["found"]


def test_draws_that_no_seed_decides_are_found(toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = iter(range(1000))
    whole = toy.ToyProcessing.collate

    def collate(self: Any, encoded: Any, generator: Any) -> Any:
        return {**whole(self, encoded, generator), "drawn": torch.tensor(next(number))}

    monkeypatch.setattr(toy.ToyProcessing, "collate", collate)
    assert "the same seed gives another batch" in answers(toy, tmp_path)["draws"]["found"]


def test_a_package_of_another_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "requires", lambda _: ["torch>=99", "numpy>=1.0", "no-such-thing>=1"])
    with pytest.raises(Exception, match=r"torch>=99: \d.*; no-such-thing>=1: not installed"):
        environment.versions()


def test_a_metric_that_is_no_number_is_found(toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy.Task, "score", lambda self, records: {"points": float("nan")})
    found = answers(toy, tmp_path, "checkpoint.best=points")["evaluated"]
    assert "the metric that decides is no number" in found["found"]
