"""Memory by part and strategy, and what fits: by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from luthier.common.errors import LuthierError
from luthier.common.estimate import devices, memory
from luthier.common.estimate.step import Step
from luthier.common.recipe import OptimSection

MB = 10**6
STEP = Step(
    parameters=100 * MB, trained=50 * MB, weights=400 * MB, gradients=200 * MB, layer=30 * MB, held=600 * MB,
    peak=700 * MB, forward=0, backward=0, cost=1.0, examples=1, cache=0,
)  # fmt: skip
ADAM = OptimSection()


def test_one_device_holds_all() -> None:
    found = memory.of(STEP, ADAM, "auto", 1)
    assert (found.weights, found.gradients, found.optimizer) == (400 * MB, 200 * MB, 400 * MB)
    assert found.total == (400 + 400 + 700) * MB


@pytest.mark.parametrize(
    ("strategy", "parts", "step"),
    [
        # gradients are copied into the buckets in which they are sent
        ("ddp", (400, 200, 400), 700 + 200),
        # an eighth of all; a layer put together, and the next
        ("fsdp2", (50, 25, 50), 700 - 200 + 25 + 2 * 30),
        ("deepspeed_zero1", (400, 200, 50), 700 + 200),
        ("deepspeed_zero2", (400, 25, 50), 700 - 200 + 25 + 25),
        ("deepspeed_zero3", (50, 25, 50), 700 - 200 + 25 + 2 * 30),
        ("deepspeed_zero2_offload", (400, 25, 0), 700 - 200 + 25 + 25),
    ],
)
def test_eight_devices_share_what_the_strategy_cuts(strategy: str, parts: tuple[int, ...], step: int) -> None:
    found = memory.of(STEP, ADAM, strategy, 8)
    assert (found.weights, found.gradients, found.optimizer) == tuple(part * MB for part in parts)
    assert found.step == step * MB


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ({"name": "adamw"}, 2 * 200 * MB),
        ({"name": "sgd", "momentum": 0.9}, 200 * MB),
        ({"name": "sgd", "momentum": 0.0}, 0),
        ({"name": "adamw_8bit"}, 50 * MB * 2 * 1.02),  # two moments of a byte, and their scales
    ],
)
def test_moments_of_the_optimizers(optim: dict[str, object], expected: float) -> None:
    assert memory.moments(OptimSection.model_validate(optim), STEP) == expected


def test_the_mildest_change_that_fits() -> None:
    plain = memory.Memory(100, 50, 100, 400, 450)  # 650
    checkpointed = memory.Memory(100, 50, 100, 100, 150)  # 350
    assert memory.fitting(plain, checkpointed, 650, False) == "as it is"
    assert memory.fitting(plain, checkpointed, 649, False) == "train.gradient_checkpointing=true"
    # halved: 200 + 50 + 100 / 2 = 300
    halved = "train.gradient_checkpointing=true, data.batch divided by 2, train.accumulate times 2"
    assert memory.fitting(plain, checkpointed, 300, False) == halved
    assert memory.fitting(plain, checkpointed, 249, False) is None, "weights, optimizer and gradients alone are 250"
    assert memory.fitting(plain, checkpointed, 350, True) == "as it is"


def test_keys_and_values_of_rollouts_count_where_they_are_more_than_a_step() -> None:
    assert memory.Memory(100, 50, 100, 400, 450, rollouts=900).total == 1100


def test_the_device_that_is_here_has_the_memory_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85_000_000_000))
    found = devices.find(None)
    assert (found.half, found.memory) == (312e12, 85e9)


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    assert devices.find("h100").peak("bf16-mixed") == 989e12
    assert devices.find("h100").peak("32") == 494e12
    with pytest.raises(LuthierError, match="'h100' perhaps"):
        devices.find("h1000")
