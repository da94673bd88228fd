"""The optimizer step: exactly the gradient of the summed loss of all that is in it, divided by what carries loss.

The expected numbers come from a plain loop in float64 over the same examples (`by_hand`), which knows nothing of
windows, padding or ranks.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from luthier.common import optim, task
from luthier.common.data.collect import collect
from luthier.common.data.plan import Plan
from luthier.common.errors import BadExample, CheckpointError, LuthierError
from luthier.common.evaluation.run import evaluate, spread
from luthier.common.gradients import total_norm
from luthier.common.seeding import seed_everything
from luthier.common.training import data, run
from luthier.common.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch")

LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5]


@pytest.fixture
def file(toy: Any, tmp_path: Path) -> Path:
    return toy.write_data(tmp_path / "train.jsonl", LENGTHS)  # type: ignore[no-any-return]


def steps_of(toy: Any, recipe: Any) -> tuple[list[list[int]], list[Any]]:
    """(examples of each optimizer step, all examples), from the plan of a run on one device."""
    collected = collect(recipe.data.train, toy.ToyProcessing(0), recipe.data)
    plan: Plan = data.plan(recipe, collected, toy.ToyProcessing(0), 1, recipe.train.accumulate)
    steps: list[list[int]] = [[] for _ in range(plan.steps)]
    for batch in plan.batches():
        steps[batch.number // plan.per_step] += batch.indices
    return steps, collected.examples


def by_hand(
    toy: Any, recipe: Any, steps: Sequence[Sequence[int]], examples: Sequence[Any]
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """(weights at the end, mean loss of each step, gradient norm of each step before clipping), with plain SGD."""
    seed_everything(recipe.train.seed)
    net = toy.Task(recipe).model.double().train()
    losses, norms = [], []
    for step in steps:
        total: Any = 0.0
        count = 0
        for index in step:
            x = torch.tensor(examples[index]["x"], dtype=torch.float64)
            y = torch.tensor(examples[index]["y"], dtype=torch.float64)
            total = total + (net(x) - y).square().sum()
            count += len(y)
        parameters = list(net.parameters())
        gradients = torch.autograd.grad(total / count, parameters)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        clip = min(1.0, recipe.optim.clip_norm / norm) if recipe.optim.clip_norm else 1.0
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= recipe.optim.learning_rate * clip * gradient
        losses.append(float(total.detach()) / count)
        norms.append(norm)
    return {f"model.{name}": value.detach() for name, value in net.named_parameters()}, losses, norms


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=0, atol=1e-6, msg=name)


def numbers(curve: list[tuple[int, str]]) -> list[float]:
    return [float(value) for _, value in curve]


# ------------------------------------------------------------------------------------------------ normalisation


@pytest.mark.parametrize(
    ("accumulate", "examples", "steps"),
    [(1, 8, 2), (4, 2, 2), (8, 1, 2), (3, 2, 2), (2, 5, 2), (12, 1, 1), (1, 1, 12)],
)
def test_updates_equal_those_computed_by_hand(
    toy: Any, file: Path, tmp_path: Path, accumulate: int, examples: int, steps: int
) -> None:
    """12 examples with 1 to 6 points each; the last window is shorter in most of the cases (8 + 4, 10 + 2)."""
    recipe = toy.make(tmp_path / "out", file, f"train.accumulate={accumulate}", f"data.batch.examples={examples}")
    plan, rows = steps_of(toy, recipe)
    assert len(plan) == steps
    weights, losses, norms = by_hand(toy, recipe, plan, rows)
    train(recipe)
    close(toy.weights(recipe_folder(recipe)), weights)
    assert numbers(toy.curve(tmp_path / "out")) == pytest.approx(losses, abs=1e-6)
    assert numbers(toy.curve(tmp_path / "out", "train/gradient_norm")) == pytest.approx(norms, rel=1e-5)


def recipe_folder(recipe: Any) -> Path:
    return Path(recipe.output)


def test_accumulation_equals_one_large_batch(toy: Any, file: Path, tmp_path: Path) -> None:
    """4 x 2 and 1 x 8 examples, unequal counts; the order is the same because it is cut, not drawn anew."""
    for name, accumulate, examples in (("one", 1, 8), ("four", 4, 2), ("eight", 8, 1)):
        made = toy.make(tmp_path / name, file, f"train.accumulate={accumulate}", f"data.batch.examples={examples}")
        train(made)
    close(toy.weights(tmp_path / "four"), toy.weights(tmp_path / "one"))
    close(toy.weights(tmp_path / "eight"), toy.weights(tmp_path / "one"))
    assert toy.position(tmp_path / "four")["step"] == toy.position(tmp_path / "one")["step"] == 2


def test_further_sums_are_logged_as_means_over_the_same_count(toy: Any, file: Path, tmp_path: Path) -> None:
    train(toy.make(tmp_path / "out", file, "train.accumulate=4"))
    assert numbers(toy.curve(tmp_path / "out", "train/twice")) == [2.0, 2.0]


def test_only_names_that_the_task_has_declared_are_logged(
    toy: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ranks whose batches differ would reduce differently many numbers. One that no batch has is zero."""
    monkeypatch.setattr(toy.Task, "log_names", ("never",))
    train(toy.make(tmp_path / "out", file, "train.accumulate=4"))
    assert not toy.curve(tmp_path / "out", "train/twice")
    assert numbers(toy.curve(tmp_path / "out", "train/never")) == [0.0, 0.0]


def test_padding_is_measured_over_the_window(toy: Any, file: Path, tmp_path: Path) -> None:
    recipe = toy.make(tmp_path / "out", file, "train.accumulate=6")
    plan, rows = steps_of(toy, recipe)
    train(recipe)
    lengths = [len(rows[index]["y"]) for index in plan[0]]
    padded = sum(2 * max(lengths[at : at + 2]) for at in range(0, 12, 2))
    assert numbers(toy.curve(tmp_path / "out", "train/padding")) == pytest.approx([1 - sum(lengths) / padded])


# ------------------------------------------------------------------------------------------------ clipping


class AfterClipping(Callback):
    """Norm of the gradient that the optimizer used, and the record of the step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.results: list[task.StepResult] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._stepped(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            assert all(parameter.grad is None for parameter in pl_module.parameters()), "free before the next forward"

    def _stepped(self, pl_module: Any) -> None:
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self.norms.append(math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients)))
        self.results.append(pl_module.last_step)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("bound", [0.3, 100.0])
def test_the_mean_gradient_is_clipped_and_not_the_sum(
    toy: Any, file: Path, tmp_path: Path, accumulate: int, bound: float
) -> None:
    recipe = toy.make(tmp_path / "out", file, f"train.accumulate={accumulate}", f"optim.clip_norm={bound}")
    plan, rows = steps_of(toy, recipe)
    weights, _, norms = by_hand(toy, recipe, plan, rows)
    seen = AfterClipping()
    train(recipe, [seen])
    assert seen.norms == pytest.approx([min(norm, bound) for norm in norms], rel=1e-4)
    assert [result.norm for result in seen.results] == pytest.approx(norms, rel=1e-4)
    assert (max(norms) > bound) == (bound < 1)
    for name, value in toy.weights(tmp_path / "out").items():
        torch.testing.assert_close(value.double(), weights[name], rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------ nothing, NaN


def fixed(toy: Any, tmp_path: Path, troubles: dict[int, str]) -> Callable[..., Any]:
    """Recipes over 12 examples of one batch each, in which some have trouble."""
    file = toy.write_data(tmp_path / "troubled.jsonl", LENGTHS, troubles)

    def make(name: str, *overrides: str) -> Any:
        return toy.make(tmp_path / name, file, "data.batch.examples=1", "checkpoint.every=1", *overrides)

    return make


def weights_after(toy: Any, folder: Path) -> list[dict[str, Tensor]]:
    return [
        torch.load(path / "state" / "trainer.pt", weights_only=True)["state_dict"] for path in toy.checkpoints(folder)
    ]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("trouble", ["empty", "unreadable", "nan"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_has_nothing_or_is_not_finite_changes_no_weight(
    toy: Any, tmp_path: Path, trouble: str, optimizer: str
) -> None:
    """Not by the gradient, and not by weight decay or momentum either."""
    make = fixed(toy, tmp_path, {4: trouble})
    recipe = make("out", f"optim.name={optimizer}", "optim.momentum=0.9", "optim.weight_decay=0.1")
    plan, _ = steps_of(toy, recipe)
    at = next(step for step, indices in enumerate(plan) if 4 in indices)
    train(recipe)
    found = weights_after(toy, tmp_path / "out")
    unchanged = [step for step in range(1, 12) if same(found[step - 1], found[step])]
    assert unchanged == ([at] if at else [])
    assert len(found) == 12
    position = toy.position(tmp_path / "out")
    assert (position["step"], position["skipped"], position["bad"]) == (12, 1, trouble == "unreadable")
    assert all(value.isfinite().all() for value in found[-1].values())


@pytest.mark.parametrize("trouble", ["empty", "unreadable"])
def test_in_a_window_with_others_nothing_counts_for_nothing(toy: Any, tmp_path: Path, trouble: str) -> None:
    make = fixed(toy, tmp_path, {4: trouble, 7: trouble})
    recipe = make("out", "train.accumulate=6")
    plan, rows = steps_of(toy, recipe)
    weights, losses, _ = by_hand(toy, recipe, [[i for i in step if i not in (4, 7)] for step in plan], rows)
    train(recipe)
    close(toy.weights(tmp_path / "out"), weights)
    assert numbers(toy.curve(tmp_path / "out")) == pytest.approx(losses, abs=1e-6)
    assert toy.position(tmp_path / "out")["skipped"] == 0


def test_a_window_with_one_nan_is_left_out_as_a_whole(toy: Any, tmp_path: Path) -> None:
    make = fixed(toy, tmp_path, {4: "nan"})
    recipe = make("out", "train.accumulate=4")
    plan, rows = steps_of(toy, recipe)
    weights, _, _ = by_hand(toy, recipe, [step for step in plan if 4 not in step], rows)
    train(recipe)
    close(toy.weights(tmp_path / "out"), weights)
    assert toy.position(tmp_path / "out")["skipped"] == 1


def test_a_broken_gradient_of_a_finite_loss_is_left_out(
    toy: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The square root at 0: its value is 0, its gradient is not finite."""
    clean = toy.Task.loss

    def broken(self: Any, batch: dict[str, Tensor]) -> task.LossSum:
        found = clean(self, batch)
        if float(batch["mask"].sum()) == 7:  # one batch only: 1 + 6 points
            return task.LossSum(found.sum + (self.model.last.weight.sum() * 0).abs().sqrt(), found.count)
        return found

    monkeypatch.setattr(toy.Task, "loss", broken)
    train(toy.make(tmp_path / "out", file, "train.steps=40", "train.epochs=null", "optim.learning_rate=0.001"))
    assert toy.position(tmp_path / "out")["skipped"] > 0
    assert all(value.isfinite().all() for value in toy.weights(tmp_path / "out").values())


def test_too_many_skipped_steps_in_a_row_stop_the_run(
    toy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = fixed(toy, tmp_path, dict.fromkeys(range(12), "nan"))
    with pytest.raises(LuthierError, match="4 optimizer steps in a row had no finite loss and gradient") as caught:
        train(make("out", "train.max_skipped=3"))
    assert "train.max_skipped" in str(caught.value)
    assert "gradient norm nan" in str(caught.value)
    assert [record.message[:15] for record in caplog.records if "left out:" in record.message][:2] == [
        "step 1 left out",
        "step 2 left out",
    ]


def test_skipped_steps_count_in_a_row_only(toy: Any, tmp_path: Path) -> None:
    probe = fixed(toy, tmp_path, {})("probe")
    order = [step[0] for step in steps_of(toy, probe)[0]]
    make = fixed(toy, tmp_path, {order[step]: "nan" for step in (0, 1, 3, 4, 8, 9, 11)})
    train(make("out", "train.max_skipped=2"))
    assert toy.position(tmp_path / "out")["skipped"] == 7
    with pytest.raises(LuthierError, match="2 optimizer steps in a row"):
        train(make("again", "train.max_skipped=1"))


def test_a_window_without_anything_to_learn_is_no_reason_to_stop(toy: Any, tmp_path: Path) -> None:
    make = fixed(toy, tmp_path, dict.fromkeys(range(1, 12), "empty"))
    train(make("out", "train.max_skipped=0"))


def test_weights_that_are_not_finite_are_never_saved(
    toy: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poison(Callback):
        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 4:
                pl_module.model.last.bias.data.fill_(float("inf"))

    with pytest.raises((CheckpointError, LuthierError)) as caught:
        train(toy.make(tmp_path / "out", file, "train.max_skipped=99"), [Poison()])
    assert "not finite" in str(caught.value)
    assert "model.last.bias" in str(caught.value)
    assert [path.name for path in toy.checkpoints(tmp_path / "out")] == ["step-00000003"]
    assert toy.position(tmp_path / "out")["step"] == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_example_stops_a_run_that_wants_it(toy: Any, tmp_path: Path, workers: int) -> None:
    """As itself, also when it was met in a data worker."""
    make = fixed(toy, tmp_path, {4: "unreadable"})
    with pytest.raises(BadExample, match=r"troubled\.jsonl:5: can't be read any more"):
        train(make("out", "data.on_bad=raise", f"data.workers={workers}"))


# ------------------------------------------------------------------------------------------------ modes


class Modes(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, bool]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        names = ("trunk", "trunk.0", "trunk.1", "trunk.2", "first", "norm", "dropout", "last")
        self.seen.append({name: pl_module.model.get_submodule(name).training for name in names})


def test_frozen_parts_are_in_eval_mode_and_trained_parts_in_train_mode_at_every_step(
    toy: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also right after an evaluation, and for a model that comes in eval mode, as transformers gives it."""
    build = toy.Task.__init__

    def as_transformers_does(self: Any, *arguments: Any) -> None:
        build(self, *arguments)
        self.eval()

    monkeypatch.setattr(toy.Task, "__init__", as_transformers_does)
    modes = Modes()
    overrides = ("task.frozen=true", "task.norm=true", "task.dropout=0.5", "evaluate.every=2", "evaluate.at_start=true")
    train(toy.make(tmp_path / "out", file, f"data.validation={file}", *overrides), [modes])
    assert len(modes.seen) == 6
    for seen in modes.seen:
        assert {name for name, mode in seen.items() if mode} == {"first", "norm", "dropout", "last"}


def test_a_frozen_norm_keeps_its_statistics(toy: Any, file: Path, tmp_path: Path) -> None:
    seed_everything(0)
    recipe = toy.make(tmp_path / "out", file, "task.frozen=true", "task.norm=true")
    before = toy.Task(recipe).model.state_dict()
    train(recipe)
    after = toy.load_file(toy.checkpoints(tmp_path / "out")[-1] / "model" / "model.safetensors")
    same_names = {name for name in before if torch.equal(before[name], after[name])}
    assert same_names == {name for name in before if name.startswith("trunk")}


# ------------------------------------------------------------------------------------------------ evaluation


def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(toy: Any, file: Path, tmp_path: Path) -> None:
    seed_everything(0)
    recipe = toy.make(tmp_path / "out", file, "task.dropout=0.5", "task.frozen=true")
    model = toy.Task(recipe)
    model.train_mode()
    collected = collect(recipe.data.train, model.processing, recipe.data)
    with torch.no_grad():
        net = model.model.double().eval()
        total = count = 0.0
        for row in collected.examples:
            error = net(torch.tensor(row["x"], dtype=torch.float64)) - torch.tensor(row["y"], dtype=torch.float64)
            total, count = total + float(error.square().sum()), count + len(row["y"])
    model.model.float()
    model.train_mode()
    for batch in (1, 2, 5, 12, 100):
        made = toy.make(tmp_path / "out", file, f"evaluate.batch={batch}", "task.dropout=0.5", "task.frozen=true")
        found = evaluate(model, collected, made)
        assert found.metrics["loss"] == pytest.approx(total / count, abs=1e-6)
        assert (found.metrics["points"], found.metrics["examples"]) == (count, 12)
        assert model.model.dropout.training
        assert not model.model.trunk.training


def test_the_records_of_an_evaluation_come_in_the_order_of_the_data(toy: Any, file: Path, tmp_path: Path) -> None:
    recipe = toy.make(tmp_path / "out", file, "evaluate.batch=3", "evaluate.samples=12")
    model = toy.Task(recipe)
    collected = collect(recipe.data.train, model.processing, recipe.data)
    found = evaluate(model, collected, recipe)
    assert [sample["points"] for sample in found.samples] == LENGTHS
    limited = evaluate(model, collected, recipe, limit=3)
    assert limited.metrics["examples"] == 3
    assert spread(12, 3) == [0, 6, 11]
    assert spread(3, 5) == [0, 1, 2]
    assert len(set(spread(1000, 77))) == 77


def test_an_evaluation_puts_modes_back_also_after_an_error(
    toy: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = toy.make(tmp_path / "out", file)
    model = toy.Task(recipe)
    model.train_mode()

    def broken(*_: Any) -> None:
        raise RuntimeError("while predicting")

    monkeypatch.setattr(toy.Task, "predict", broken)
    with pytest.raises(RuntimeError, match="while predicting"):
        evaluate(model, collect(recipe.data.train, model.processing, recipe.data), recipe)
    assert model.model.training


def test_unreadable_examples_are_left_out_of_an_evaluation_and_told(
    toy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = toy.write_data(tmp_path / "v.jsonl", LENGTHS, {0: "unreadable"})
    recipe = toy.make(tmp_path / "out", file, "evaluate.batch=1")
    model = toy.Task(recipe)
    with caplog.at_level(logging.WARNING, logger="luthier"):
        found = evaluate(model, collect(recipe.data.train, model.processing, recipe.data), recipe)
    assert found.metrics["examples"] == 11
    assert any("left out of the evaluation: v.jsonl:1" in record.message for record in caplog.records)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_example_stops_an_evaluation_that_wants_it(toy: Any, tmp_path: Path, workers: int) -> None:
    file = toy.write_data(tmp_path / "v.jsonl", LENGTHS, {4: "unreadable"})
    recipe = toy.make(tmp_path / "out", file, "data.on_bad=raise")
    model = toy.Task(recipe)
    collected = collect(recipe.data.train, model.processing, recipe.data)
    with pytest.raises(BadExample, match=r"v\.jsonl:5: can't be read any more"):
        evaluate(model, collected, recipe, workers=workers)


def test_an_evaluation_does_not_change_the_training(toy: Any, file: Path, tmp_path: Path) -> None:
    """Dropout, augmentation and order are the same with and without evaluations in between."""
    varied = ("task.dropout=0.5", "task.noise=0.3", "task.norm=true")
    train(toy.make(tmp_path / "without", file, *varied))
    overrides = ("evaluate.every=1", "evaluate.at_start=true", f"data.validation={file}")
    train(toy.make(tmp_path / "with", file, *varied, *overrides))
    assert toy.curve(tmp_path / "with") == toy.curve(tmp_path / "without")
    assert same(toy.weights(tmp_path / "with"), toy.weights(tmp_path / "without"))
    evaluated = [step for step, _ in toy.curve(tmp_path / "with", "validation/loss")]
    assert evaluated == list(range(7))


# ------------------------------------------------------------------------------------------------ half precision


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lightning's loss scaling, as for `precision: 16-mixed`, which it gives by itself on a GPU only."""

    def use(scale: float) -> None:
        made = run._trainer

        def trainer(*arguments: Any) -> Any:
            found = made(*arguments)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # type: ignore[attr-defined]
            found.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler)
            return found

        monkeypatch.setattr(run, "_trainer", trainer)

    return use


HALF = "train.precision=16-mixed"


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_scaled_loss_gives_the_same_norm(
    toy: Any, file: Path, tmp_path: Path, scaled: Callable[[float], None], name: str
) -> None:
    recipe = toy.make(tmp_path / "out", file, HALF, f"optim.name={name}", "optim.clip_norm=0.1", "train.accumulate=12")
    _, _, norms = by_hand(toy, recipe, *steps_of(toy, recipe))
    scaled(64.0)
    train(recipe)
    assert numbers(toy.curve(tmp_path / "out", "train/gradient_norm")) == pytest.approx(norms, rel=0.02)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_overflow_of_the_scaled_loss_is_a_skipped_step(
    toy: Any, file: Path, tmp_path: Path, scaled: Callable[[float], None], name: str
) -> None:
    scaled(2.0**16)
    train(toy.make(tmp_path / "out", file, HALF, f"optim.name={name}", "data.batch.examples=1"))
    position = toy.position(tmp_path / "out")
    assert position["step"] == 12
    assert 0 < position["skipped"] < 12


def test_the_learning_rate_of_a_step_is_the_one_it_was_made_with(toy: Any, file: Path, tmp_path: Path) -> None:
    options = ("optim.schedule=linear", "optim.warmup=3", "optim.learning_rate=0.5")
    recipe = toy.make(tmp_path / "out", file, *options)
    train(recipe)
    expected = [0.5 * optim.factor(recipe.optim, step, 6) for step in range(6)]
    assert numbers(toy.curve(tmp_path / "out", "train/learning_rate")) == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------ building blocks


def test_modes_follow_what_is_trained() -> None:
    model = nn.ModuleDict(
        {
            "frozen": nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2))),
            "partly": nn.ModuleDict({"base": nn.Linear(2, 2), "adapter": nn.Linear(2, 2), "dropout": nn.Dropout()}),
            "dropout": nn.Dropout(),
        }
    )
    model["frozen"].requires_grad_(False)
    model["partly"]["base"].requires_grad_(False)
    task._set_modes(model, True)
    assert {name for name, module in model.named_modules() if module.training} == {
        "", "partly", "partly.adapter", "partly.dropout", "dropout",
    }  # fmt: skip


def test_the_norm_is_that_of_all_gradients_together() -> None:
    gradients = [torch.full((2, 2), 3.0), torch.tensor([4.0, 0.0]), torch.tensor(0.0)]
    assert float(total_norm(gradients)) == pytest.approx(math.sqrt(4 * 9 + 16))
    assert float(total_norm([])) == 0
    assert math.isnan(float(total_norm([torch.tensor([float("nan")]), torch.ones(2)])))


# ------------------------------------------------------------------------------------------------ several processes


def outcome(root: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / f"{name}.rank{rank}.json").read_text())
    return found


def test_two_processes_equal_one_on_the_same_global_batches(toy: Any, two_processes: Path, tmp_path: Path) -> None:
    """With dropout too: what is dropped depends on the batch, not on the process that has it."""
    file = two_processes / "train.jsonl"
    train(toy.make(tmp_path / "one", file, "train.accumulate=4", "task.dropout=0.3"))
    close(toy.weights(two_processes / "plain"), toy.weights(tmp_path / "one"))
    curves = [numbers(toy.curve(folder)) for folder in (two_processes / "plain", tmp_path / "one")]
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)
    assert len(curves[0]) == 2


def test_two_processes_equal_the_computation_by_hand(toy: Any, two_processes: Path, tmp_path: Path) -> None:
    """Different numbers of points on the two processes, and the norm over both."""
    file = two_processes / "train.jsonl"
    recipe = toy.make(tmp_path / "one", file, "train.accumulate=2", "optim.clip_norm=0.3")
    weights, losses, norms = by_hand(toy, recipe, *steps_of(toy, recipe))
    found = toy.weights(two_processes / "clipped")
    for name, value in weights.items():
        torch.testing.assert_close(found[name].double(), value, rtol=0, atol=1e-5)
    assert numbers(toy.curve(two_processes / "clipped")) == pytest.approx(losses, abs=1e-5)
    assert numbers(toy.curve(two_processes / "clipped", "train/gradient_norm")) == pytest.approx(norms, rel=1e-4)
    evaluated = json.loads((two_processes / "clipped" / "metrics.json").read_text())
    assert (evaluated["points"], evaluated["examples"]) == (sum(LENGTHS), 12)


def test_an_odd_last_step_is_shared_out_and_each_example_counts_once(
    toy: Any, two_processes: Path, tmp_path: Path
) -> None:
    """13 examples in batches of 3: 3 + 3, 3 + 3, and then 1, which two processes can't share."""
    file = two_processes / "odd.jsonl"
    recipe = toy.make(tmp_path / "one", file, "train.accumulate=2", "data.batch.examples=3")
    weights, _, _ = by_hand(toy, recipe, *steps_of(toy, recipe))
    assert outcome(two_processes, "odd").get("error") is None
    close(toy.weights(two_processes / "odd"), weights)


def test_a_nan_on_one_process_is_left_out_on_both(toy: Any, two_processes: Path, tmp_path: Path) -> None:
    recipe = toy.make(tmp_path / "one", two_processes / "nan.jsonl", "train.accumulate=2", "data.batch.examples=1")
    plan, rows = steps_of(toy, recipe)
    weights, _, _ = by_hand(toy, recipe, [step for step in plan if 4 not in step], rows)
    close(toy.weights(two_processes / "nan"), weights)
    assert toy.position(two_processes / "nan")["skipped"] == 1


def test_a_process_with_nothing_to_learn_from_waits_for_the_other(
    toy: Any, two_processes: Path, tmp_path: Path
) -> None:
    """On either side, by an empty or an unreadable example, and once on both."""
    recipe = toy.make(tmp_path / "one", two_processes / "empty.jsonl", "train.accumulate=2", "data.batch.examples=1")
    plan, rows = steps_of(toy, recipe)
    left = [[index for index in step if not rows[index]["trouble"]] for step in plan]
    assert [len(step) for step in left].count(1) == 4
    weights, _, _ = by_hand(toy, recipe, [step for step in left if step], rows)
    close(toy.weights(two_processes / "empty"), weights)
    assert toy.position(two_processes / "empty")["skipped"] == 1


def test_unreadable_examples_are_counted_on_all_processes(toy: Any, two_processes: Path) -> None:
    assert toy.position(two_processes / "empty")["bad"] == 3


def test_all_processes_reduce_equally_many_numbers(
    toy: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when one of them has a batch in which nothing carries loss, and so has nothing further to log."""
    reduced: list[int] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: reduced.append(len(tensor)))
    for window in ([task.LossSum(torch.tensor(1.0), 2.0, {"twice": 4.0})], [task.LossSum(torch.tensor(0.0), 0.0)]):
        model = toy.Task(toy.make(tmp_path / "out", file))
        strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": 0, "num_replicas": 2})
        model._trainer = SimpleNamespace(world_size=2, strategy=strategy)
        model._window = window
        model._close_window()
    assert reduced[0] == reduced[1]


def test_a_signal_to_one_process_stops_both_and_the_run_goes_on_as_if_nothing_had_happened(
    toy: Any, two_processes: Path, tmp_path: Path
) -> None:
    train(toy.make(tmp_path / "one", two_processes / "train.jsonl", "train.accumulate=2", "checkpoint.every=99"))
    names = [path.name for path in toy.checkpoints(two_processes / "signal")]
    assert names == ["step-00000002", "step-00000003"]  # saved on the signal, and at the end
    assert outcome(two_processes, "signal") == outcome(two_processes, "signal", 1)
    close(toy.weights(two_processes / "signal"), toy.weights(tmp_path / "one"))


def test_both_processes_end_without_an_error(two_processes: Path) -> None:
    for name in ("plain", "clipped", "nan", "empty", "signal", "odd"):
        for rank in (0, 1):
            assert outcome(two_processes, name, rank) == {"stopped_by": 0, "folder": str(two_processes / name)}
