"""Watching inside a training: the numbers are those computed by hand, and the training does not notice."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from luthier.common.checkpoint import directory
from luthier.common.data.collect import collect
from luthier.common.data.plan import Plan
from luthier.common.errors import RecipeError
from luthier.common.seeding import seed_everything
from luthier.common.training import curves, data, inside
from luthier.common.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch")

LENGTHS = [1, 6, 2, 5, 3, 4, 1, 1, 6, 2, 3, 5]
RATE, MOMENTUM, CLIP = 0.05, 0.9, 0.3
VARIED = (
    "task.dropout=0.4", "task.noise=0.3", "task.norm=true", "task.layers=2", "optim.name=adamw",
    "optim.weight_decay=0.1", "optim.schedule=cosine", "optim.clip_norm=1.0", "train.accumulate=2", "train.epochs=2",
)  # fmt: skip


@pytest.fixture
def file(toy: Any, tmp_path: Path) -> Path:
    return toy.write_data(tmp_path / "train.jsonl", LENGTHS)  # type: ignore[no-any-return]


def found(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> name -> value of a run's debug.csv; no name may come twice in a step."""
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for row in curves.read(folder / inside.FILE):
        values = steps[int(row["step"])]
        assert row["name"] not in values
        values[row["name"]] = float(row["value"])
    return dict(steps)


def by_hand(toy: Any, recipe: Any) -> dict[int, dict[str, float]]:
    """All that is written, from a plain loop in float64 over the plan's examples, with SGD and momentum."""
    collected = collect(recipe.data.train, toy.ToyProcessing(0), recipe.data)
    plan: Plan = data.plan(recipe, collected, toy.ToyProcessing(0), 1, recipe.train.accumulate)
    steps: list[list[int]] = [[] for _ in range(plan.steps)]
    for batch in plan.batches():
        steps[batch.number // plan.per_step] += batch.indices
    seed_everything(recipe.train.seed)
    net = toy.Task(recipe).model.double().train()
    momentum = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    return {
        at: one_step(net, [collected.examples[index] for index in step], momentum)
        for at, step in enumerate(steps, start=1)
    }


def one_step(net: nn.Module, examples: list[Any], momentum: dict[str, Tensor]) -> dict[str, float]:
    x = torch.cat([torch.tensor(example["x"], dtype=torch.float64) for example in examples])
    y = torch.cat([torch.tensor(example["y"], dtype=torch.float64) for example in examples])
    first = net.get_submodule("first")(x)
    hidden = torch.tanh(first)
    out = net.get_submodule("last")(hidden)
    outputs = {"trunk": x, "first": first, "norm": first, "dropout": hidden, "last": out}
    loss = (out[:, 0] - y).square().sum() / len(y)
    names = [name for name, _ in net.named_parameters()]
    gradients = dict(zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True))
    clip = min(1.0, CLIP / math.sqrt(sum(float(value.square().sum()) for value in gradients.values())))
    values: dict[str, float] = {}
    for name, parameter in net.named_parameters():
        momentum[name] = MOMENTUM * momentum[name] + clip * gradients[name]
        values[f"gradient_norm/model.{name}"] = float(gradients[name].norm())
        values[f"gradient_zero/model.{name}"] = values[f"gradient_nonfinite/model.{name}"] = 0.0
        values[f"weight_norm/model.{name}"] = float(parameter.detach().norm())
        values[f"update_ratio/model.{name}"] = float(RATE * momentum[name].norm() / parameter.detach().norm())
        values[f"momentum_buffer_norm/model.{name}"] = float(momentum[name].norm())
        with torch.no_grad():
            parameter -= RATE * momentum[name]
    for name, output in ((name, output.detach()) for name, output in outputs.items()):
        values[f"activation_mean/model.{name}"] = float(output.mean())
        values[f"activation_std/model.{name}"] = float(output.std(correction=0))
        values[f"activation_largest/model.{name}"] = float(output.abs().max())
        values[f"activation_nonfinite/model.{name}"] = 0.0
    return values


@pytest.mark.parametrize("accumulate", [1, 4])
def test_what_is_written_equals_the_computation_by_hand(
    toy: Any, file: Path, tmp_path: Path, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clipping, momentum, padding, batches of unequal sizes and a last window that is shorter (6 batches, 4)."""
    monkeypatch.setattr(inside, "CHUNK", 7)  # an output is looked at in pieces, the last one smaller
    options = (f"optim.clip_norm={CLIP}", f"optim.momentum={MOMENTUM}", f"optim.learning_rate={RATE}")
    recipe = toy.make(tmp_path / "out", file, *options, f"train.accumulate={accumulate}", "train.debug.every=1")
    expected = by_hand(toy, recipe)
    train(recipe)
    seen = found(tmp_path / "out")
    assert seen.keys() == expected.keys()
    for step, values in expected.items():
        assert seen[step] == pytest.approx(values, rel=1e-4, abs=1e-6)
        norms = [value for name, value in seen[step].items() if name.startswith("gradient_norm/")]
        whole = float(dict(toy.curve(tmp_path / "out", "train/gradient_norm"))[step])
        assert math.hypot(*norms) == pytest.approx(whole, rel=1e-6)
        assert whole > CLIP


def test_the_moments_of_adam(toy: Any, file: Path, tmp_path: Path) -> None:
    """After the first step they are (1 - beta1) g and (1 - beta2) g^2, and the update is the learning rate times the
    sign of g, so that its norm is the rate times the root of the number of elements."""
    options = ("optim.name=adamw", "optim.eps=1e-20", "optim.learning_rate=0.01", "train.debug.every=1")
    train(toy.make(tmp_path / "out", file, *options))
    first = found(tmp_path / "out")[1]
    for name, number in (("first.weight", 24), ("first.bias", 8), ("last.weight", 8), ("last.bias", 1)):
        norm = first[f"gradient_norm/model.{name}"]
        assert first[f"exp_avg_norm/model.{name}"] == pytest.approx(0.1 * norm, rel=1e-4)
        if number == 1:
            assert first[f"exp_avg_sq_norm/model.{name}"] == pytest.approx(0.001 * norm**2, rel=1e-4)
        update = first[f"update_ratio/model.{name}"] * first[f"weight_norm/model.{name}"]
        assert update == pytest.approx(0.01 * math.sqrt(number), rel=1e-4)
    assert not any(name.startswith("step") for name in first)


# ------------------------------------------------------------------------------------------------ nothing is changed


def test_the_training_is_the_same_to_the_last_bit(toy: Any, file: Path, tmp_path: Path) -> None:
    train(toy.make(tmp_path / "without", file, *VARIED))
    train(toy.make(tmp_path / "with", file, *VARIED, "train.debug.every=1"))
    ours, theirs = (toy.state(tmp_path / name) for name in ("with", "without"))
    for name, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], value), name
    moments = theirs["optimizer_states"][0]["state"]
    for key, values in ours["optimizer_states"][0]["state"].items():
        assert all(torch.equal(torch.as_tensor(values[name]), torch.as_tensor(moments[key][name])) for name in values)
    for name in ("loss", "gradient_norm"):
        assert toy.curve(tmp_path / "with", f"train/{name}") == toy.curve(tmp_path / "without", f"train/{name}")
    assert not (tmp_path / "without" / inside.FILE).exists()
    assert len(found(tmp_path / "with")) == 6


@pytest.fixture
def hooks(toy: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For each batch: modules with a forward hook while the loss is computed, and in its backward pass."""
    seen: list[tuple[int, int]] = []
    loss = toy.Task.loss

    def counted(self: Any, batch: dict[str, Tensor]) -> Any:
        def count() -> int:
            return sum(bool(module._forward_hooks) for module in self.modules())

        at, result = count(), loss(self, batch)
        result.sum.register_hook(lambda _: seen.append((at, count())))
        return result

    monkeypatch.setattr(toy.Task, "loss", counted)
    return seen


def test_only_steps_that_are_due_are_looked_at(
    toy: Any, file: Path, tmp_path: Path, hooks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks are there in the forward passes of due steps alone: a backward pass may run layers again."""
    contents, asked = inside._contents, []
    monkeypatch.setattr(inside, "_contents", lambda tensor: asked.append(tensor) or contents(tensor))
    options = ("train.accumulate=2", "train.steps=7", "train.debug.every=3")
    train(toy.make(tmp_path / "out", file, "train.epochs=null", *options))
    assert list(found(tmp_path / "out")) == [3, 6]
    due, idle = (5 + 1, 0), (0, 0)  # trunk, first, norm, dropout, last; and layers, which is a list and empty
    assert hooks == [idle] * 4 + [due] * 2 + [idle] * 4 + [due] * 2 + [idle] * 2
    assert len(asked) == 2 * 4  # parameters


def test_no_hook_is_left_behind_by_an_error(toy: Any, file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    tasks = []

    def broken(self: Any, batch: Any) -> Any:
        tasks.append(self)
        raise ZeroDivisionError

    monkeypatch.setattr(toy.Task, "loss", broken)
    with pytest.raises(ZeroDivisionError):
        train(toy.make(tmp_path / "out", file, "train.debug.every=1"))
    assert not any(module._forward_hooks for module in tasks[0].modules())


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("option", "missing"),
    [
        ("gradients", {"gradient_norm", "gradient_zero", "gradient_nonfinite"}),
        ("activations", {"activation_mean", "activation_std", "activation_largest", "activation_nonfinite"}),
        ("optimizer", {"weight_norm", "update_ratio", "exp_avg_norm", "exp_avg_sq_norm"}),
    ],
)
def test_each_part_can_be_left_out(toy: Any, file: Path, tmp_path: Path, option: str, missing: set[str]) -> None:
    for name, options in (("all", ()), ("part", (f"train.debug.{option}=false",))):
        train(toy.make(tmp_path / name, file, "optim.name=adamw", "train.debug.every=3", *options))
    kinds = [{name.split("/")[0] for name in found(tmp_path / folder)[3]} for folder in ("all", "part")]
    assert kinds[0] - kinds[1] == missing


def test_names_can_be_chosen(toy: Any, file: Path, tmp_path: Path) -> None:
    train(toy.make(tmp_path / "out", file, "task.layers=2", "train.debug.every=3", r"train.debug.match=layers\.1"))
    names = {name.split("/")[1] for name in found(tmp_path / "out")[3]}
    assert names == {"model.layers.1", "model.layers.1.weight", "model.layers.1.bias"}


def test_frozen_parameters_are_left_out(toy: Any, file: Path, tmp_path: Path) -> None:
    train(toy.make(tmp_path / "out", file, "task.frozen=true", "train.debug.every=3", "train.debug.activations=false"))
    names = {name.split("/")[1] for name in found(tmp_path / "out")[3]}
    assert names == {f"model.{layer}.{kind}" for layer in ("first", "last") for kind in ("weight", "bias")}


def test_a_compiled_model_can_not_be_looked_into(toy: Any, file: Path, tmp_path: Path) -> None:
    compiled = ("train.compile=true", "train.debug.every=3")
    with pytest.raises(RecipeError, match=r"debug\.activations can't look into a compiled model"):
        toy.make(tmp_path / "out", file, *compiled)
    toy.make(tmp_path / "out", file, *compiled, "train.debug.activations=false")
    with pytest.raises(RecipeError, match="not a regular expression"):
        toy.make(tmp_path / "out", file, "train.debug.match=(")


# ------------------------------------------------------------------------------------------------ steps left out


def test_a_step_that_is_not_finite_shows_where(toy: Any, tmp_path: Path) -> None:
    """All points of a step are nan: so are all gradients; the weights stay, and the activations are fine."""
    file = toy.write_data(tmp_path / "nan.jsonl", [3] * 6, dict.fromkeys(range(6), "nan"))
    train(toy.make(tmp_path / "out", file, "train.debug.every=2", "optim.momentum=0.9"))
    values = found(tmp_path / "out")[2]
    for name in ("first.weight", "first.bias", "last.weight", "last.bias"):
        assert math.isnan(values[f"gradient_norm/model.{name}"])
        assert values[f"gradient_nonfinite/model.{name}"] == 1
        assert values[f"update_ratio/model.{name}"] == 0
    assert values["activation_nonfinite/model.last"] == 0
    assert not any(name.startswith("momentum_buffer") for name in values)  # there was no step that made one


# ------------------------------------------------------------------------------------------------ resuming


def test_rows_go_on_without_doubling_or_gaps(toy: Any, file: Path, tmp_path: Path) -> None:
    options = (*VARIED, "train.debug.every=1", "checkpoint.every=2")
    train(toy.make(tmp_path / "whole", file, *options))
    text = (tmp_path / "whole" / inside.FILE).read_text()
    for step in (2, 4):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole", folder, symlinks=True)
        for path in directory.committed(folder / "checkpoints"):
            if directory.step_of(path) > step:
                shutil.rmtree(path)
        train(toy.make(folder, file, *options))
        assert (folder / inside.FILE).read_text() == text
    assert list(found(tmp_path / "whole")) == [1, 2, 3, 4, 5, 6]


# ------------------------------------------------------------------------------------------------ several processes


def test_two_processes_see_what_one_sees(toy: Any, file: Path, tmp_path: Path) -> None:
    """Of gradients, weights and optimizer state, replicated (ddp) or cut over the processes (fsdp2); written once.
    Activations are those of the first process."""
    options = ("task.layers=2", "optim.name=adamw", "optim.clip_norm=0.3", "train.debug.every=2")
    jobs = [
        {
            "output": str(tmp_path / strategy),
            "train": str(file),
            "overrides": [*options, "train.devices=2", f"train.strategy={strategy}"],
        }
        for strategy in ("ddp", "fsdp2")
    ]
    toy.launch(tmp_path, jobs)
    train(toy.make(tmp_path / "one", file, *options, "train.accumulate=2"))
    expected = found(tmp_path / "one")
    assert list(expected) == [2]
    for strategy in ("ddp", "fsdp2"):
        seen = found(tmp_path / strategy)
        assert list(seen) == [2]
        assert seen[2].keys() == expected[2].keys()
        for name, value in expected[2].items():
            if not name.startswith("activation"):
                assert seen[2][name] == pytest.approx(value, rel=1e-4, abs=1e-7), (strategy, name)


# ------------------------------------------------------------------------------------------------ the pieces


def test_what_a_tensor_holds() -> None:
    norm, zeros, broken = inside._contents(torch.tensor([[3.0, 0.0, -4.0], [0.0, 0.0, 0.0]])).tolist()
    assert (norm, zeros, broken) == (5, 4, 0)
    norm, zeros, broken = inside._contents(torch.tensor([1.0, math.inf, math.nan, -math.inf, 0.0])).tolist()
    assert math.isnan(norm)
    assert (zeros, broken) == (1, 3)
    assert inside._contents(torch.tensor([3.0, 4.0], dtype=torch.float64)).tolist() == [5, 0, 0]
    # In bf16 a sum of 2^16 ones would stop at 256.
    assert inside._contents(torch.ones(2**16, dtype=torch.bfloat16)).tolist() == [256, 0, 0]


def test_the_first_tensor_of_floats_is_a_modules_output() -> None:
    floats, integers = torch.ones(2), torch.ones(2, dtype=torch.int64)
    outputs: list[Any] = [floats, (integers, None, floats), {"ids": integers, "hidden": [floats]}]
    for output in outputs:
        assert inside._first(output) is floats
    for output in (integers, None, "text", (None, {})):
        assert inside._first(output) is None


def test_what_is_not_finite_stays_visible() -> None:
    seen: Callable[..., dict[str, float]] = lambda *parts: inside._of_outputs({"m": parts})  # noqa: E731
    one, other = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([math.nan, math.nan, math.nan, 1.0])
    for parts in ([(1, one), (3, other)], [(3, other), (1, one)]):
        values = seen(*parts)
        assert all(math.isnan(values[f"activation_{kind}/m"]) for kind in ("mean", "std", "largest"))
        assert values["activation_nonfinite/m"] == 0.25
