"""Steps that go wrong: which ones are spikes, that they are left out everywhere, and that their examples are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from luthier.common.checkpoint import directory
from luthier.common.data.collect import collect
from luthier.common.data.plan import Planned
from luthier.common.data.processing import Processing
from luthier.common.errors import LuthierError, RecipeError
from luthier.common.training import data
from luthier.common.training.run import train
from luthier.common.training.spikes import FILE, FIRST, WINDOW, Spikes

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch")

EACH = ("data.batch.examples=1", "optim.learning_rate=0.02")
SKIP = ("train.spike_factor=100", "train.on_spike=skip")
RECORD = ("train.spike_factor=100",)
"""An example whose targets are 1000 times as large has a loss about a million times as large; the ordinary ones are
within a factor of 100 of each other."""

# ------------------------------------------------------------------------------------------------ which are spikes


def after(losses: list[float], factor: float = 3.0, skip: bool = False) -> Spikes:
    spikes = Spikes(factor, skip)
    for loss in losses:
        spikes.seen(loss)
    return spikes


def test_no_spike_before_there_are_enough_losses() -> None:
    assert (FIRST, WINDOW) == (20, 50)
    assert not after([1.0] * 19).seen(1e9)
    assert after([1.0] * 20).seen(1e9)


def test_the_bound_is_the_factor_times_the_median() -> None:
    losses = [1.0, 2.0, 4.0, 100.0] * 5  # median (2 + 4) / 2 = 3, mean 26.75
    assert not after(losses).seen(9.0)
    assert after(losses).seen(9.001)


@pytest.mark.parametrize(("new", "spike"), [(24, False), (25, True), (26, True)])
def test_only_the_last_50_losses_count(new: int, spike: bool) -> None:
    """Of the last 50 losses `new` are 1 and the others 10: the median is 10, 5.5 or 1, and 17 above 3 x 5.5."""
    assert after([10.0] * 60 + [1.0] * new).seen(17.0) is spike


def test_a_recorded_spike_is_in_the_window_and_a_skipped_one_is_not() -> None:
    """From 1 to 10 for good, bound 3: beside 20 ones, k tens leave the median at 1 while k < 20; then it is 5.5."""
    recorded, skipped = after([1.0] * 20), after([1.0] * 20, skip=True)
    assert [recorded.seen(10.0) for _ in range(50)] == [True] * 20 + [False] * 30
    assert [skipped.seen(10.0) for _ in range(50)] == [True] * 50


@pytest.mark.parametrize("usual", [0.0, -1.0])
def test_a_ratio_to_a_median_that_is_not_positive_means_nothing(usual: float) -> None:
    assert not after([usual] * 30).seen(5.0)


def test_nothing_is_a_spike_unless_asked() -> None:
    spikes = Spikes(None, skip=False)
    assert not any(spikes.seen(loss) for loss in [1.0] * 30 + [1e9])


def test_the_state_gives_the_same_decisions() -> None:
    losses = [1.0 + 0.1 * (i % 7) for i in range(70)]
    first = after(losses)
    second = Spikes(3.0, skip=False)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [3.8, 3.9, 4.0, 4.1, 2.0] * 20
    decisions = [first.seen(loss) for loss in rest]
    assert [second.seen(loss) for loss in rest] == decisions
    assert 0 < sum(decisions) < len(decisions)
    assert len(second.state_dict()["losses"]) == WINDOW


def test_a_factor_that_calls_the_median_a_spike_is_refused(toy: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.spike_factor"):
        toy.make(tmp_path / "out", tmp_path / "none.jsonl", "train.spike_factor=1")


# ------------------------------------------------------------------------------------------------ in a training


def planned(toy: Any, recipe: Any, ranks: int = 1) -> list[list[Planned]]:
    """The batches of each optimizer step, over all ranks."""
    collected = collect(recipe.data.train, toy.ToyProcessing(0), recipe.data)
    plan = data.plan(recipe, collected, toy.ToyProcessing(0), ranks, ranks * recipe.train.accumulate)
    steps: list[list[Planned]] = [[] for _ in range(plan.steps)]
    for rank in range(ranks):
        for batch in plan.batches(0, rank):
            steps[batch.number // plan.per_step].append(batch)
    return [sorted(step, key=lambda batch: batch.number) for step in steps]


Planted = Callable[..., Any]


@pytest.fixture
def planted(toy: Any, tmp_path: Path) -> Planted:
    """Makes a recipe whose steps (from 1) have these troubles in the last example of their last batch."""

    def make(name: str, troubles: Mapping[int, str], *overrides: str, rows: int = 40) -> Any:
        file = tmp_path / f"{name}.jsonl"
        toy.write_data(file, [3] * rows)
        recipe = toy.make(tmp_path / name, file, *EACH, *overrides)
        steps = planned(toy, recipe)
        toy.write_data(file, [3] * rows, {steps[at - 1][-1].indices[-1]: what for at, what in troubles.items()})
        return recipe

    return make


def lines(folder: Path) -> list[dict[str, Any]]:
    """The record, read as strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (folder / FILE).read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def named(toy: Any, recipe: Any, at: int) -> dict[str, Any]:
    """What the record must say of where step `at` comes from; rows of a file are counted from 1."""
    batches = planned(toy, recipe)[at - 1]
    file = recipe.data.train[0].path
    return {
        "step": at,
        "batches": [batch.number for batch in batches],
        "examples": [f"{Path(file).name}:{index + 1}" for batch in batches for index in batch.indices],
    }


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_spike_changes_nothing_and_its_examples_are_named(
    toy: Any, planted: Planted, tmp_path: Path, accumulate: int
) -> None:
    """Left out just as a step that isn't finite at the same place is."""
    options = (*SKIP, f"train.accumulate={accumulate}", "optim.name=adamw", "optim.weight_decay=0.1")
    recipe = planted("spike", {25: "huge", 31: "huge"}, *options, rows=40 * accumulate)
    train(recipe)
    train(planted("nan", {25: "nan", 31: "nan"}, *options, rows=40 * accumulate))
    assert same(toy.weights(tmp_path / "spike"), toy.weights(tmp_path / "nan"))
    position = toy.position(tmp_path / "spike")
    assert (position["step"], position["skipped"]) == (40, 2)

    found = lines(tmp_path / "spike")
    losses, norms = (dict(toy.curve(tmp_path / "spike", f"train/{name}")) for name in ("loss", "gradient_norm"))
    for line, at in zip(found, (25, 31), strict=True):
        expected = {**named(toy, recipe, at), "reason": "spike", "left_out": True}
        assert len(expected["examples"]) == accumulate
        assert {name: line[name] for name in expected} == expected
        assert f"{line['loss']:.8g}" == losses[at]
        assert f"{line['gradient_norm']:.8g}" == norms[at]


def test_a_recorded_spike_is_trained_on(
    toy: Any, planted: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = planted("spike", {25: "huge"}, *RECORD, "optim.clip_norm=0.1", "checkpoint.every=1")
    train(recipe)
    (line,) = lines(tmp_path / "spike")
    expected = {**named(toy, recipe, 25), "reason": "spike", "left_out": False}
    assert {name: line[name] for name in expected} == expected
    assert toy.position(tmp_path / "spike")["skipped"] == 0
    assert any(record.message.startswith("step 25 recorded: the loss is a spike") for record in caplog.records)

    spiked = tmp_path / "spike"
    before, after = (
        torch.load(spiked / "checkpoints" / directory.name(step) / "state" / "trainer.pt")["state_dict"]
        for step in (24, 25)
    )
    assert not same(before, after)
    without = planted("without", {25: "huge"}, "optim.clip_norm=0.1")
    train(without)  # looking for spikes changes nothing
    assert same(toy.weights(spiked), toy.weights(tmp_path / "without"))
    assert not (tmp_path / "without" / FILE).exists()


def test_an_ordinary_run_records_nothing(toy: Any, planted: Planted, tmp_path: Path) -> None:
    for name, options in (("plain", ()), ("looked", RECORD), ("skipping", SKIP)):
        train(planted(name, {}, *options))
        assert not (tmp_path / name / FILE).exists()
    assert same(toy.weights(tmp_path / "plain"), toy.weights(tmp_path / "skipping"))


def test_steps_that_are_not_finite_or_have_nothing_are_recorded(toy: Any, planted: Planted, tmp_path: Path) -> None:
    troubles = {2: "nan", 4: "empty", 6: "unreadable"}
    recipe = planted("out", troubles)
    train(recipe)
    found = lines(tmp_path / "out")
    assert [(line["step"], line["reason"], line["left_out"]) for line in found] == [
        (2, "non_finite", True),
        (4, "nothing", True),
        (6, "nothing", True),
    ]
    assert found[0]["loss"] == found[0]["gradient_norm"] == "nan"
    for line in found:
        assert line == {**line, **named(toy, recipe, line["step"])}


def test_a_last_step_that_is_shorter(toy: Any, planted: Planted, tmp_path: Path) -> None:
    """45 batches in steps of 2: the last has one."""
    recipe = planted("out", {23: "huge"}, *SKIP, "train.accumulate=2", rows=45)
    train(recipe)
    (line,) = lines(tmp_path / "out")
    assert (line["step"], line["batches"], len(line["examples"])) == (23, [44], 1)
    assert line == {**line, **named(toy, recipe, 23)}


# ------------------------------------------------------------------------------------------------ too many in a row


def test_a_level_that_has_changed_for_good_ends_the_run(planted: Planted, tmp_path: Path) -> None:
    recipe = planted("out", dict.fromkeys(range(25, 41), "huge"), *SKIP, "train.max_skipped=3")
    with pytest.raises(
        LuthierError, match="4 optimizer steps in a row were left out, the last for a loss spike"
    ) as caught:
        train(recipe)
    assert "train.on_spike=record" in str(caught.value)
    assert str(tmp_path / "out" / FILE) in str(caught.value)
    assert [line["step"] for line in lines(tmp_path / "out")] == [25, 26, 27, 28]


def test_spikes_and_other_steps_are_counted_in_one_row(planted: Planted, tmp_path: Path) -> None:
    troubles = {25: "huge", 26: "nan", 27: "huge", 28: "nan"}
    train(planted("enough", troubles, *SKIP, "train.max_skipped=4"))
    with pytest.raises(LuthierError, match="4 optimizer steps in a row had no finite loss and gradient") as caught:
        train(planted("few", troubles, *SKIP, "train.max_skipped=3"))
    assert str(tmp_path / "few" / FILE) in str(caught.value)
    reasons = [line["reason"] for line in lines(tmp_path / "few")]
    assert reasons == ["spike", "non_finite", "spike", "non_finite"]


def test_recorded_spikes_end_nothing(planted: Planted, tmp_path: Path) -> None:
    troubles = dict.fromkeys(range(25, 31), "huge")
    train(planted("out", troubles, *RECORD, "train.max_skipped=0", "optim.clip_norm=0.001"))
    assert [line["step"] for line in lines(tmp_path / "out")] == [25, 26, 27, 28, 29, 30]


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("on_spike", ["skip", "record"])
def test_resuming_makes_the_same_decisions_and_doubles_no_line(
    toy: Any, planted: Planted, tmp_path: Path, on_spike: str
) -> None:
    """Killed after the last checkpoint too, in the middle of a line. Spikes come 1, 3 and 6 steps after a resume, when
    a new window would know none: 20 losses are needed."""
    troubles = {22: "huge", 23: "nan", 27: "huge", 36: "huge"}
    options = (*RECORD, f"train.on_spike={on_spike}", "optim.clip_norm=0.1", "task.dropout=0.3", "optim.name=adamw")
    recipe = planted("whole", troubles, *options)
    train(recipe)
    text = (tmp_path / "whole" / FILE).read_text()
    assert [line["step"] for line in lines(tmp_path / "whole")] == [22, 23, 27, 36]
    for step in (18, 21, 24, 30, 33):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole", folder, symlinks=True)
        for path in directory.committed(folder / "checkpoints"):
            if directory.step_of(path) > step:
                shutil.rmtree(path)
        (folder / FILE).write_text(text + '{"step": 37, "rea')
        train(toy.make(folder, Path(recipe.data.train[0].path), *EACH, *options))
        assert (folder / FILE).read_text() == text
        assert same(toy.weights(folder), toy.weights(tmp_path / "whole"))
        assert toy.state(folder)["spikes"] == toy.state(tmp_path / "whole")["spikes"]
        assert toy.position(folder)["skipped"] == toy.position(tmp_path / "whole")["skipped"]
        assert toy.curve(folder) == toy.curve(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------ several processes


def test_on_two_processes(toy: Any, tmp_path: Path) -> None:
    """A spike on the second and a nan on the first: left out on both, recorded once with the examples of both."""
    file = toy.write_data(tmp_path / "train.jsonl", [3] * 48)
    options = (*EACH, *SKIP, "optim.name=adamw")
    recipe = toy.make(tmp_path / "one", file, *options, "train.accumulate=2")
    steps = planned(toy, recipe)
    assert steps == planned(toy, toy.make(tmp_path / "two", file, *options), ranks=2)
    toy.write_data(file, [3] * 48, {steps[22][1].indices[0]: "huge", steps[4][0].indices[0]: "nan"})
    job = {"output": str(tmp_path / "two"), "train": str(file), "overrides": [*options, "train.devices=2"]}
    toy.launch(tmp_path, [job])
    for rank in (0, 1):
        assert json.loads((tmp_path / f"two.rank{rank}.json").read_text())["stopped_by"] == 0

    train(recipe)
    found = lines(tmp_path / "two")
    assert [(line["step"], line["reason"]) for line in found] == [(5, "non_finite"), (23, "spike")]
    for line, ours in zip(found, lines(tmp_path / "one"), strict=True):
        assert line == {**line, **named(toy, recipe, line["step"])}
        assert len(line["examples"]) == 2
        assert {**line, "loss": 0, "gradient_norm": 0} == {**ours, "loss": 0, "gradient_norm": 0}
    assert found[1]["loss"] == pytest.approx(lines(tmp_path / "one")[1]["loss"], rel=1e-6)
    assert toy.position(tmp_path / "two")["skipped"] == 2
    for name, value in toy.weights(tmp_path / "one").items():
        torch.testing.assert_close(toy.weights(tmp_path / "two")[name], value, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------ names of examples


@pytest.mark.parametrize(
    ("example", "name"),
    [
        ({"where": "a.jsonl:3"}, "a.jsonl:3"),
        (SimpleNamespace(where="b.tsv:1"), "b.tsv:1"),
        ({"text": "..."}, "unknown"),
        (7, "unknown"),
    ],
)
def test_an_example_is_named_by_where_it_comes_from(example: Any, name: str) -> None:
    assert Processing.name(None, example) == name  # type: ignore[arg-type]
