"""Schedules at their key steps, and which parameter gets which rate and decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from luthier.common import optim
from luthier.common.errors import ModelError
from luthier.common.recipe import OptimSection


def section(**values: Any) -> OptimSection:
    return OptimSection(**values)


def rates(total: int, **values: Any) -> list[float]:
    return [optim.factor(section(**values), step, total) for step in range(total)]


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_the_warm_up_is_a_line_that_would_reach_the_peak_at_its_end(schedule: str) -> None:
    found = rates(100, schedule=schedule, warmup=4)
    assert found[:4] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5])
    assert found[4] == pytest.approx(math.sqrt(4 / 5) if schedule == "inverse_sqrt" else 1.0)
    assert max(found) <= 1
    assert min(found) > 0


@pytest.mark.parametrize(("warmup", "steps"), [(0.0, 0), (0.1, 10), (0.25, 25), (1, 1), (7, 7), (0.004, 0)])
def test_a_warm_up_below_one_is_a_share_of_all_steps(warmup: float, steps: int) -> None:
    found = rates(100, schedule="constant", warmup=warmup)
    assert found.index(1.0) == steps


def test_constant() -> None:
    assert rates(10, schedule="constant", warmup=0) == [1.0] * 10


def test_linear() -> None:
    """The first step after the warm-up has the peak, and the step after the last would have `final`."""
    found = rates(12, schedule="linear", warmup=2)
    assert found[2:] == pytest.approx([1 - step / 10 for step in range(10)])
    assert optim.factor(section(schedule="linear", warmup=2), 12, 12) == 0
    assert optim.factor(section(schedule="linear", warmup=2, final=0.3), 12, 12) == pytest.approx(0.3)
    assert optim.factor(section(schedule="linear", warmup=2, final=0.3), 7, 12) == pytest.approx((1 + 0.3) / 2)


def test_cosine() -> None:
    one = section(schedule="cosine", warmup=0, final=0.2)
    half = 0.8 * math.sqrt(0.5) / 2  # cos(45 degrees)
    expected = {0: 1.0, 25: 0.6 + half, 50: 0.6, 75: 0.6 - half, 100: 0.2}
    for step, value in expected.items():
        assert optim.factor(one, step, 100) == pytest.approx(value)


def test_warm_up_stable_decay() -> None:
    """Constant, then linear over the last fifth of what follows the warm-up."""
    one = section(schedule="wsd", warmup=10, final=0.1)
    assert optim.factor(one, 10, 110) == 1.0
    assert optim.factor(one, 89, 110) == 1.0
    assert optim.factor(one, 90, 110) == pytest.approx(1.0)
    assert optim.factor(one, 100, 110) == pytest.approx(0.55)
    assert optim.factor(one, 110, 110) == pytest.approx(0.1)


def test_inverse_square_root() -> None:
    """sqrt(warmup / step): at four times the warm-up, half of the peak (arXiv:1706.03762, section 5.3)."""
    one = section(schedule="inverse_sqrt", warmup=100)
    assert optim.factor(one, 99, 10_000) == pytest.approx(100 / 101)
    assert optim.factor(one, 399, 10_000) == pytest.approx(0.5)
    assert optim.factor(one, 9_999, 10_000) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant", "inverse_sqrt"])
@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0, 0.1, 0.9, 5])
def test_short_runs_train_at_every_step(schedule: str, total: int, warmup: float) -> None:
    for value in rates(total, schedule=schedule, warmup=warmup):
        assert 0 < value <= 1


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_beyond_the_end_the_rate_stays(schedule: str) -> None:
    assert optim.factor(section(schedule=schedule, final=0.1), 500, 100) == pytest.approx(0.1)


def test_the_optimizer_follows_the_schedule_in_each_group() -> None:
    one = section(
        name="sgd", learning_rate=0.5, momentum=0, warmup=1, schedule="linear",
        groups=({"match": "bias", "learning_rate": 0.1},),
    )  # fmt: skip
    model = nn.Linear(2, 2)
    optimizer = optim.optimizer(model, one)
    schedule = optim.schedule(optimizer, one, 5)
    seen = []
    for _ in range(5):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    shares = [0.5, 1.0, 0.75, 0.5, 0.25]
    assert seen == [[pytest.approx(0.5 * share), pytest.approx(0.1 * share)] for share in shares]


# ------------------------------------------------------------------------------------------------ groups


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.encoder = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.lora_A = nn.Linear(4, 2, bias=False)


def by_name(model: nn.Module, one: OptimSection) -> dict[str, tuple[float, float]]:
    """(rate, decay) of each parameter, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[float, float]] = {}
    for group in optim.groups(model, one):
        for parameter in group["params"]:
            assert names[parameter] not in found
            found[names[parameter]] = (group["lr"], group["weight_decay"])
    return found


def test_vectors_and_scalars_do_not_decay() -> None:
    found = by_name(Model(), section(learning_rate=1.0, weight_decay=0.1))
    assert found == {
        "embed.weight": (1.0, 0.1),
        "norm.weight": (1.0, 0.0),
        "norm.bias": (1.0, 0.0),
        "encoder.weight": (1.0, 0.1),
        "encoder.bias": (1.0, 0.0),
        "scale": (1.0, 0.0),
        "lora_A.weight": (1.0, 0.1),
    }


def test_patterns_give_other_rates_and_decays_and_the_first_that_is_found_counts() -> None:
    groups = (
        {"match": "lora_", "learning_rate": 9.0},
        {"match": r"^enc.*\.weight$", "weight_decay": 0.5},
        {"match": "encoder|norm", "learning_rate": 3.0, "weight_decay": 0.7},
    )
    found = by_name(Model(), section(learning_rate=1.0, weight_decay=0.1, groups=groups))
    assert found["lora_A.weight"] == (9.0, 0.1)
    assert found["encoder.weight"] == (1.0, 0.5)
    assert found["encoder.bias"] == (3.0, 0.0)
    assert found["norm.weight"] == (3.0, 0.0)
    assert found["embed.weight"] == (1.0, 0.1)


def test_frozen_parameters_are_in_no_group() -> None:
    model = Model()
    model.encoder.requires_grad_(False)
    assert not any(name.startswith("encoder") for name in by_name(model, section()))


def test_nothing_to_train() -> None:
    model = Model().requires_grad_(False)
    with pytest.raises(ModelError, match="nothing to train"):
        optim.optimizer(model, section())


def test_a_shared_parameter_is_trained_once() -> None:
    model = Model()
    model.head = nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    assert len(by_name(model, section())) == 7


# ------------------------------------------------------------------------------------------------ optimizers


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_each_optimizer_steps(name: str, kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = optim.optimizer(model, section(name=name, learning_rate=0.05, momentum=0.5, betas=(0.8, 0.9)))
    assert type(optimizer) is kind
    x, y = torch.randn(16, 3), torch.randn(16, 2)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_the_settings_of_adam() -> None:
    optimizer = optim.optimizer(nn.Linear(2, 2), section(betas=(0.7, 0.8), eps=1e-5, weight_decay=0.3))
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.7, 0.8), 1e-5, 0.3)


def test_adamw_decays_the_weight_and_not_the_gradient() -> None:
    """With a zero gradient a step is exactly w - rate * decay * w (Loshchilov and Hutter, arXiv:1711.05101)."""
    model = nn.Linear(2, 2)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = optim.optimizer(model, section(learning_rate=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before["weight"] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(model.bias.detach(), before["bias"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_weight_decay_is_decoupled_for_every_optimizer(name: str) -> None:
    """`weight_decay` is described as decoupled: with a zero gradient the weight shrinks by rate * decay, whatever the
    optimizer."""
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    optimizer = optim.optimizer(model, section(name=name, learning_rate=1e-3, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 1e-3 * 0.5), rtol=1e-6, atol=1e-7)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    """What the task relies on when it skips a step: dropped gradients mean no update, no decay, no momentum."""
    for name in ("adamw", "sgd", "adafactor"):
        model = nn.Linear(2, 2)
        optimizer = optim.optimizer(model, section(name=name, weight_decay=0.5))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_the_fused_kernel_is_used_unless_refused(fused: bool) -> None:
    """It would unscale a scaled gradient by itself, after the clipping."""
    optimizer = optim.optimizer(nn.Linear(2, 2), section(name="adamw"), fused=fused)
    assert bool(optimizer.defaults["fused"]) is fused
    assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) is fused
