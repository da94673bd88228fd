"""A run that was stopped and goes on is, bit for bit, the run that was not stopped."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer

from luthier.common.checkpoint import directory
from luthier.common.checkpoint.position import Position
from luthier.common.errors import CheckpointError, LuthierError, RecipeError
from luthier.common.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch")

VARIED = (
    "task.dropout=0.4", "task.noise=0.3", "task.norm=true", "optim.name=adamw", "optim.weight_decay=0.1",
    "optim.schedule=cosine", "optim.warmup=3", "optim.clip_norm=1.0", "data.batch.bucket_batches=2",
)  # fmt: skip
"""Everything that could differ after a resume: dropout, augmentation, running statistics, moments, schedule, order."""


@pytest.fixture
def file(toy: Any, tmp_path: Path) -> Path:
    """24 examples: 12 batches of 2 in an epoch."""
    return toy.write_data(tmp_path / "train.jsonl", [1 + (5 * i) % 7 for i in range(24)])  # type: ignore[no-any-return]


@pytest.fixture
def make(toy: Any, file: Path, tmp_path: Path) -> Callable[..., Any]:
    def made(name: str, *overrides: str) -> Any:
        return toy.make(tmp_path / name, file, *VARIED, *overrides)

    return made


def copy_until(folder: Path, target: Path, step: int) -> Path:
    """The run as it was when the checkpoint of `step` had just been saved, killed some steps later."""
    shutil.copytree(folder, target, symlinks=True)
    for path in directory.committed(target / "checkpoints"):
        if directory.step_of(path) > step:
            shutil.rmtree(path)
    directory.point(target / "checkpoints" / "last", target / "checkpoints" / directory.name(step))
    return target


def equal(toy: Any, first: Path, second: Path) -> None:
    """The same losses, the same weights and running statistics, the same optimizer, to the last bit."""
    for name in ("loss", "gradient_norm", "learning_rate", "epoch", "padding", "twice"):
        assert toy.curve(first, f"train/{name}") == toy.curve(second, f"train/{name}")
    ours, theirs = toy.state(first), toy.state(second)
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, value in ours["state_dict"].items():
        assert torch.equal(value, theirs["state_dict"][name]), name
    there = theirs["optimizer_states"][0]["state"]
    for key, moments in ours["optimizer_states"][0]["state"].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(there[key][name])) for name, value in moments.items()
        )
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    assert {**toy.position(first), "seconds": 0} == {**toy.position(second), "seconds": 0}


# ------------------------------------------------------------------------------------------------ from checkpoints


@pytest.mark.parametrize(("accumulate", "workers"), [(1, 0), (2, 0), (5, 0), (1, 2)])
def test_from_every_checkpoint_the_rest_is_the_same(
    toy: Any, make: Callable[..., Any], tmp_path: Path, accumulate: int, workers: int
) -> None:
    """Also across the border of an epoch, and with a last window that is shorter (24 batches, accumulate 5)."""
    epochs = 1 if accumulate == 1 else 2
    options = (f"train.accumulate={accumulate}", f"train.epochs={epochs}", "checkpoint.every=3")
    train(make("whole", *options))
    saved = [directory.step_of(path) for path in toy.checkpoints(tmp_path / "whole")]
    assert saved == ([3, 5] if accumulate == 5 else [3, 6, 9, 12])
    for step in saved[:-1] if not workers else saved[1:2]:
        folder = copy_until(tmp_path / "whole", tmp_path / f"from-{step}", step)
        train(make(folder.name, *options, f"data.workers={workers}"))
        equal(toy, folder, tmp_path / "whole")
        steps = [at for at, _ in toy.curve(folder)]
        assert steps == list(range(1, saved[-1] + 1))  # none doubled, none missing


def test_a_frozen_part_with_statistics_of_its_own_resumes_too(
    toy: Any, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make("whole", "task.frozen=true"))
    copy_until(tmp_path / "whole", tmp_path / "part", 6)
    train(make("part", "task.frozen=true"))
    equal(toy, tmp_path / "part", tmp_path / "whole")


def test_a_model_that_comes_in_eval_mode_resumes_too(
    toy: Any, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every model does that `from_pretrained` gave."""
    build = toy.Task.__init__

    def as_transformers_does(self: Any, *arguments: Any) -> None:
        build(self, *arguments)
        self.eval()

    monkeypatch.setattr(toy.Task, "__init__", as_transformers_does)
    train(make("whole"))
    copy_until(tmp_path / "whole", tmp_path / "part", 6)
    train(make("part"))
    equal(toy, tmp_path / "part", tmp_path / "whole")


def test_with_evaluations_in_between(toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path) -> None:
    options = (f"data.validation={file}", "evaluate.every=4", "evaluate.at_start=true", "checkpoint.every=3")
    train(make("whole", *options))
    for step in (3, 4, 6, 8):
        folder = copy_until(tmp_path / "whole", tmp_path / f"from-{step}", step)
        train(make(folder.name, *options))
        equal(toy, folder, tmp_path / "whole")
        assert toy.curve(folder, "validation/loss") == toy.curve(tmp_path / "whole", "validation/loss")
        lines = [(path / "evaluations.jsonl").read_text() for path in (folder, tmp_path / "whole")]
        assert lines[0] == lines[1]
        best = [json.loads((path / "metrics.json").read_text())["loss"] for path in (folder, tmp_path / "whole")]
        assert best[0] == best[1]
        pointed = [os.readlink(path / "checkpoints" / "best") for path in (folder, tmp_path / "whole")]
        assert pointed[0] == pointed[1]


def test_from_the_checkpoint_before_when_the_newest_is_broken(
    toy: Any, make: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make("whole"))
    folder = copy_until(tmp_path / "whole", tmp_path / "part", 9)
    broken = folder / "checkpoints" / "step-00000009" / "state" / "trainer.pt"
    broken.write_bytes(broken.read_bytes()[:-100])
    train(make("part"))
    assert "state/trainer.pt" in caplog.text
    equal(toy, folder, tmp_path / "whole")
    assert (folder / "checkpoints" / "step-00000009.broken" / "BROKEN").is_file()
    assert directory.fault(folder / "checkpoints" / "step-00000009") is None  # saved again on the way


def test_when_no_checkpoint_is_whole_the_run_does_not_start_over(
    toy: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    train(make("out"))
    curve = toy.curve(tmp_path / "out")
    for path in toy.checkpoints(tmp_path / "out"):
        (path / "run.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none is whole"):
            train(make("out"))
    assert toy.curve(tmp_path / "out") == curve


# ------------------------------------------------------------------------------------------------ signals


@pytest.fixture
def handlers() -> Any:
    """After a run the handlers are those from before it."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_run_goes_on(
    toy: Any, make: Callable[..., Any], tmp_path: Path, number: int, handlers: None
) -> None:
    """Sent in the middle of an accumulation window; the window is finished first."""
    options = ("train.accumulate=2", "checkpoint.every=99")
    train(make("whole", *options))
    outcome = train(make("part", *options), [toy.At(6, lambda: os.kill(os.getpid(), number))])
    assert outcome.stopped_by == number
    assert [path.name for path in toy.checkpoints(tmp_path / "part")] == ["step-00000004"]
    assert toy.position(tmp_path / "part")["batches"] == 8
    outcome = train(make("part", *options))
    assert outcome.stopped_by == 0
    equal(toy, tmp_path / "part", tmp_path / "whole")


def test_stopped_twice(toy: Any, make: Callable[..., Any], tmp_path: Path, handlers: None) -> None:
    train(make("whole", "checkpoint.every=99"))
    for batch, step in ((3, 4), (0, 5), (2, 8)):
        assert train(make("part", "checkpoint.every=99"), [toy.At(batch, toy.terminate)]).stopped_by == signal.SIGTERM
        assert toy.position(tmp_path / "part")["step"] == step
    train(make("part", "checkpoint.every=99"))
    equal(toy, tmp_path / "part", tmp_path / "whole")


def test_stopped_where_an_evaluation_was_due(
    toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path, handlers: None
) -> None:
    """The evaluation is made up for first, and the curves are the same."""
    options = (f"data.validation={file}", "evaluate.every=4", "checkpoint.every=99")
    train(make("whole", *options))
    assert train(make("part", *options), [toy.At(3, toy.terminate)]).stopped_by
    assert toy.position(tmp_path / "part")["evaluated"] == -1
    train(make("part", *options))
    equal(toy, tmp_path / "part", tmp_path / "whole")
    made = [(tmp_path / name / "evaluations.jsonl").read_text() for name in ("part", "whole")]
    assert made[0] == made[1]


def test_an_evaluation_that_is_made_up_for_is_saved(
    toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is the best one, its metrics belong to its checkpoint."""
    given = iter([9, 5, 3])
    monkeypatch.setattr(toy.Task, "score", lambda self, records: {"points": next(given)})
    options = (f"data.validation={file}", "evaluate.every=4", "checkpoint.every=99", "checkpoint.best=points")
    train(make("part", *options), [toy.At(3, toy.terminate)])
    assert train(make("part", *options)).metrics.get("points") == 9
    best = tmp_path / "part" / "checkpoints" / "best"
    assert os.readlink(best) == "step-00000004"
    assert json.loads((best / "metrics.json").read_text())["points"] == 9


def test_stopped_at_the_very_last_step(
    toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path, handlers: None
) -> None:
    options = (f"data.validation={file}", "evaluate.every=epoch")
    train(make("part", *options), [toy.At(11, toy.terminate)])
    train(make("part", *options))
    assert [step for step, _ in toy.curve(tmp_path / "part", "validation/loss")] == [12]


def test_an_error_in_the_middle_leaves_the_checkpoints_and_the_handlers(
    toy: Any, make: Callable[..., Any], tmp_path: Path, handlers: None
) -> None:
    def broken() -> None:
        raise RuntimeError("in the middle")

    train(make("whole"))
    with pytest.raises(RuntimeError, match="in the middle"):
        train(make("part"), [toy.At(7, broken)])
    assert [path.name for path in toy.checkpoints(tmp_path / "part")] == ["step-00000003", "step-00000006"]
    train(make("part"))
    equal(toy, tmp_path / "part", tmp_path / "whole")


# ------------------------------------------------------------------------------------------------ other ranks


def test_on_two_processes_from_one(toy: Any, two_processes: Path, tmp_path: Path) -> None:
    """The same global batches (4 x 1 becomes 2 x 2) with the same dropout and noise, so the same losses."""
    folder = two_processes / "resumed"
    file = two_processes / "long.jsonl"
    train(toy.make(tmp_path / "whole", file, "task.dropout=0.3", "task.noise=0.2", "train.accumulate=4"))
    found = json.loads((two_processes / "resumed.rank0.json").read_text())
    assert found == {"stopped_by": 0, "folder": str(folder)}
    steps, losses = zip(*toy.curve(folder), strict=True)
    expected = [float(value) for _, value in toy.curve(tmp_path / "whole")]
    assert list(steps) == list(range(1, len(expected) + 1))
    assert [float(loss) for loss in losses] == pytest.approx(expected, abs=1e-6)
    for name, value in toy.weights(tmp_path / "whole").items():
        torch.testing.assert_close(toy.weights(folder)[name], value, rtol=0, atol=1e-6)
    assert toy.checkpoints(folder)[0].name == "step-00000002"


class Launched(Exception):
    """A training was about to start."""


def test_the_accumulation_follows_the_devices(
    toy: Any, make: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make("out", "train.accumulate=4", "train.epochs=2"), [toy.At(7, toy.terminate)])
    asked: list[int] = []

    def fit(self: Trainer, *_: Any, **__: Any) -> None:
        asked.append(self.accumulate_grad_batches)
        raise Launched

    monkeypatch.setattr(Trainer, "fit", fit)
    for devices, accumulate in ((1, 4), (2, 2), (4, 1)):
        with pytest.raises(Launched):
            train(make("out", "train.accumulate=4", "train.epochs=2", f"train.devices={devices}"))
        assert asked[-1] == accumulate
    assert "train.accumulate is now 2, so that the batches stay as they were" in caplog.text
    with pytest.raises(CheckpointError, match="can't be shared equally by these devices") as caught:
        train(make("out", "train.accumulate=4", "train.epochs=2", "train.devices=3"))
    assert "a divisor of 4" in str(caught.value)


def test_a_position_of_another_global_batch_is_refused() -> None:
    position = Position(per_step=4)
    with pytest.raises(CheckpointError, match="another number of batches"):
        position.restore(Position(per_step=2).as_dict())
    position.restore({**Position(per_step=4).as_dict(), "step": 7})
    assert position.step == 7


# ------------------------------------------------------------------------------------------------ the folder


def contents(folder: Path) -> dict[str, Any]:
    """When each file was written, but of what is published anew what it holds."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif name == "metrics.json":
            found[name] = path.read_bytes()
        elif name not in (".lock", "checkpoints"):
            found[name] = path.stat().st_mtime_ns
    return found


def test_a_finished_run_does_nothing(
    toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (f"data.validation={file}",)
    first = train(make("out", *options))
    before = contents(tmp_path / "out")
    second = train(make("out", *options))
    assert contents(tmp_path / "out") == before
    assert second.metrics == first.metrics
    assert second.metrics["loss"] > 0
    assert "this run is finished" in capsys.readouterr().out


def test_a_finished_run_is_finished_on_any_number_of_devices(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 batches on one device, 3 x 2 on two: the odd one was split, but there is nothing left to do."""
    file = toy.write_data(tmp_path / "odd.jsonl", [2] * 10)
    train(toy.make(tmp_path / "out", file, "train.accumulate=2"))
    assert toy.position(tmp_path / "out")["batches"] == 5

    def fit(*_: Any, **__: Any) -> None:
        raise Launched

    monkeypatch.setattr(Trainer, "fit", fit)
    train(toy.make(tmp_path / "out", file, "train.accumulate=2", "train.devices=2"))


def test_a_run_that_ran_out_of_patience_is_finished(
    toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path
) -> None:
    options = (f"data.validation={file}", "evaluate.every=1", "evaluate.patience=2", "optim.learning_rate=5")
    train(make("out", *options))
    step = toy.position(tmp_path / "out")["step"]
    assert step < 12
    train(make("out", *options))
    assert toy.position(tmp_path / "out")["step"] == step


def test_a_folder_that_is_no_run_is_refused(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(RecipeError, match="not empty and holds no run") as caught:
        train(make("out"))
    assert str(tmp_path / "out") in str(caught.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_an_empty_folder_and_a_deep_one_are_fine(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert train(make("out", "train.epochs=0.1")).folder == tmp_path / "out"
    assert train(make("a/b/c", "train.epochs=0.1")).folder == tmp_path / "a" / "b" / "c"


def test_a_file_in_the_way(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(LuthierError, match="output"):
        train(make("out"))
    with pytest.raises(LuthierError, match="output"):
        train(make("out/deeper"))


def test_another_recipe_is_refused_with_what_changed(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    train(make("out", "train.epochs=0.5"))
    curve = toy.curve(tmp_path / "out")
    with pytest.raises(CheckpointError, match="a run of another recipe") as caught:
        train(make("out", "train.epochs=0.5", "optim.learning_rate=0.125", "task.dropout=0.2", "data.batch.examples=3"))
    message = str(caught.value)
    assert "optim.learning_rate: 0.05 -> 0.125" in message
    assert "task.dropout: 0.4 -> 0.2" in message
    assert "data.batch.examples: 2 -> 3" in message
    assert "train.fresh=true" in message
    assert "train.epochs" not in message
    assert toy.curve(tmp_path / "out") == curve


def test_a_run_of_an_older_version_lacks_new_fields_and_goes_on(
    toy: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    """What a recipe could not say then has its default; a field with another value is a change as ever."""
    train(make("out", "train.epochs=0.5"))
    file = tmp_path / "out" / "recipe.yaml"
    saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    del saved["optim"]["clip_norm"], saved["task"]["dropout"]
    file.write_text(yaml.safe_dump(saved), encoding="utf-8")
    dropout = type(make("other").task).model_fields["dropout"].default
    assert train(make("out", "train.epochs=0.5", f"task.dropout={dropout}")).folder == tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"optim\.clip_norm"):
        train(make("out", "train.epochs=0.5", f"task.dropout={dropout}", "optim.clip_norm=3"))


def test_what_does_not_change_the_training_may_change(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    train(make("whole", "checkpoint.every=99"))
    train(make("part", "checkpoint.every=99"), [toy.At(4, toy.terminate)])
    changed = ("data.workers=2", "checkpoint.every=4", "checkpoint.keep_last=3", "train.max_skipped=7")
    train(make("part", *changed))
    equal(toy, tmp_path / "part", tmp_path / "whole")
    assert [path.name for path in toy.checkpoints(tmp_path / "part")] == [f"step-{step:08d}" for step in (5, 8, 12)]


def test_fresh_takes_a_new_folder(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    first = train(make("out", "train.epochs=0.5"))
    options = ("train.epochs=0.25", "train.fresh=true")
    assert [train(make("out", *options)).folder.name for _ in range(2)] == ["out-2", "out-3"]
    assert train(make("new", *options)).folder.name == "new"
    assert toy.position(first.folder)["step"] == 6
    assert toy.position(tmp_path / "out-2")["step"] == toy.position(tmp_path / "out-3")["step"] == 3


def test_a_second_run_is_locked_out(toy: Any, make: Callable[..., Any]) -> None:
    refused = []

    class Second(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with pytest.raises(LuthierError, match="another run is writing to this output") as caught:
                train(make("out"))
            refused.append(str(caught.value))

    train(make("out"), [Second()])
    assert len(refused) == 1
    train(make("out"))  # the lock is gone with the run


def test_a_refused_run_does_not_redirect_the_next(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(RecipeError):
        train(make("out"))
    assert train(make("other", "train.epochs=0.1")).folder == tmp_path / "other"


def test_leftovers_of_a_killed_save_are_cleared(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    train(make("whole"))
    folder = copy_until(tmp_path / "whole", tmp_path / "part", 6)
    half = folder / "checkpoints" / "step-00000009.tmp" / "model"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    train(make("part"))
    equal(toy, folder, tmp_path / "whole")
    assert not any(path.name.endswith(".tmp") for path in (folder / "checkpoints").iterdir())


# ------------------------------------------------------------------------------------------------ the state


def test_the_state_holds_what_is_trained_and_nothing_else(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    train(make("out", "task.frozen=true", "train.epochs=0.25"))
    names = {f"model.{part}.{kind}" for part in ("first", "norm", "last") for kind in ("weight", "bias")}
    statistics = {f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    state = toy.state(tmp_path / "out")
    assert set(state["state_dict"]) == names | statistics
    assert "loops" not in state
    assert len(state["optimizer_states"][0]["state"]) == len(names)


def test_no_code_is_ever_unpickled(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    """A checkpoint that someone has replaced and sealed again: its hashes hold, and its pickle is still refused."""

    class Malice:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    train(make("whole"))
    copy_until(tmp_path / "whole", tmp_path / "part", 6)
    folder = tmp_path / "part" / "checkpoints" / "step-00000006"
    state = toy.state(tmp_path / "part")
    state["callbacks"] = Malice()
    torch.save(state, folder / "state" / "trainer.pt")
    reseal(folder)
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        train(make("part"))
    assert not (tmp_path / "owned").exists()
    with (folder / "state" / "trainer.pt").open("wb") as stream:
        pickle.dump(Malice(), stream)
    reseal(folder)
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickl"):
        train(make("part"))
    assert not (tmp_path / "owned").exists()


def reseal(folder: Path) -> None:
    for name in ("manifest.json", "COMMIT"):
        (folder / name).unlink()
    moved = folder.rename(folder.with_name("resealed"))
    directory.commit(moved, folder)


def test_a_state_that_cannot_be_read_is_told_as_such(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    train(make("part", "train.epochs=0.5"))
    for path in toy.checkpoints(tmp_path / "part"):
        (path / "state" / "trainer.pt").write_bytes(b"no archive")
        reseal(path)
    shutil.rmtree(toy.checkpoints(tmp_path / "part")[-1])
    with pytest.raises(LuthierError, match=r"trainer\.pt"):
        train(make("part", "train.epochs=0.5"))


def test_a_checkpoint_of_other_parameters_is_refused(toy: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    train(make("whole"))
    copy_until(tmp_path / "whole", tmp_path / "part", 6)
    folder = tmp_path / "part" / "checkpoints" / "step-00000006"
    state = toy.state(tmp_path / "part")
    state["state_dict"]["model.other.weight"] = state["state_dict"].pop("model.last.weight")
    torch.save(state, folder / "state" / "trainer.pt")
    reseal(folder)
    with pytest.raises(CheckpointError, match="not those of this recipe") as caught:
        train(make("part"))
    assert "model.other.weight" in str(caught.value)
    assert "model.last.weight" in str(caught.value)


# ------------------------------------------------------------------------------------------------ a full disk


def test_a_full_disk_leaves_the_last_good_checkpoint(
    toy: Any, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make("whole"))
    save = torch.save

    def full(value: Any, stream: Any) -> None:
        if "step-00000009" in str(stream.name):
            stream.write(b"half of")
            raise OSError(28, "No space left on device")
        save(value, stream)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        train(make("part"))
    assert "step-00000009" in str(caught.value)
    monkeypatch.setattr(torch, "save", save)
    assert {path.name for path in (tmp_path / "part" / "checkpoints").iterdir()} == {
        "best", "last", "step-00000003", "step-00000006",
    }  # fmt: skip
    assert os.readlink(tmp_path / "part" / "checkpoints" / "last") == "step-00000006"
    train(make("part"))
    equal(toy, tmp_path / "part", tmp_path / "whole")


# ------------------------------------------------------------------------------------------------ best and last


def test_the_best_and_the_last_are_kept_while_the_metric_worsens(
    toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path
) -> None:
    options = (f"data.validation={file}", "evaluate.every=1", "checkpoint.keep_last=2", "checkpoint.every=1")
    outcome = train(make("out", *options, "optim.learning_rate=2"))
    history = [json.loads(line) for line in (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()]
    best = min(history, key=lambda entry: entry["loss"])
    names = {path.name for path in toy.checkpoints(tmp_path / "out")}
    assert names == {directory.name(step) for step in (best["step"], 11, 12)}
    root = tmp_path / "out" / "checkpoints"
    assert os.readlink(root / "best") == directory.name(best["step"])
    assert os.readlink(root / "last") == "step-00000012"
    assert outcome.metrics["loss"] == best["loss"] == json.loads((root / "best" / "metrics.json").read_text())["loss"]


def test_the_metric_that_decides_is_known_before_anything_is_loaded(
    toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="the task has no such metric") as caught:
        train(make("out", f"data.validation={file}", "checkpoint.best=lossy"))
    assert "loss, points" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_metric_of_which_more_is_better(
    toy: Any, make: Callable[..., Any], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([3, 7, 5, 7])
    monkeypatch.setattr(toy.Task, "score", lambda self, records: {"points": next(given)})
    options = (f"data.validation={file}", "evaluate.every=3", "checkpoint.best=points")
    assert train(make("out", *options)).metrics["points"] == 7
    assert os.readlink(tmp_path / "out" / "checkpoints" / "best") == "step-00000006"  # the first of two equals
