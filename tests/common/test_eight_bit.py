"""AdamW with its moments in 8 bits: bitsandbytes' own, near torch's AdamW, and its state goes on exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from luthier.common import optim
from luthier.common.recipe import OptimSection

pytest.importorskip("bitsandbytes")


def trained(name: Any, steps: int, state: Any = None, start: nn.Module | None = None) -> tuple[nn.Module, Any]:
    """A layer of 8,192 weights after some steps, and its optimizer."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 64)
    if start is not None:
        layer.load_state_dict(start.state_dict())
    made = optim.optimizer(layer, OptimSection(name=name, learning_rate=1e-2, weight_decay=0.1))
    if state is not None:
        made.load_state_dict(state)
    for _ in range(steps):
        made.zero_grad()
        inputs = torch.linspace(-1, 1, 128).repeat(4, 1) * torch.arange(1, 5).view(4, 1)
        (layer(inputs) - 1).square().mean().backward()
        made.step()
    return layer, made


def test_it_moves_as_adamw_does_and_keeps_large_moments_in_8_bits() -> None:
    """Of 20 steps of 1e-2 the two come apart by less than a tenth in all; a vector keeps 32 bits."""
    exact, _ = trained("adamw", 20)
    start, _ = trained("adamw", 0)
    small, made = trained("adamw_8bit", 20)
    moved = (exact.weight - start.weight).norm()
    assert float((small.weight - exact.weight).norm() / moved) < 0.1
    assert made.state[small.weight]["state1"].dtype == torch.uint8
    assert made.state[small.bias]["state1"].dtype == torch.float32


def test_its_state_goes_on_exactly(tmp_path: Any) -> None:
    whole, _ = trained("adamw_8bit", 6)
    half, made = trained("adamw_8bit", 3)
    torch.save(made.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again, _ = trained("adamw_8bit", 3, state, half)
    assert torch.equal(again.weight, whole.weight)
    assert torch.equal(again.bias, whole.bias)


def test_a_sharded_run_refuses_it() -> None:
    from types import SimpleNamespace

    from luthier.common import strategies
    from luthier.common.errors import RecipeError
    from luthier.common.recipe import ModelSection, TrainSection

    recipe: Any = SimpleNamespace(
        train=TrainSection(strategy="fsdp2"), optim=OptimSection(name="adamw_8bit"), model=ModelSection(path="x")
    )
    with pytest.raises(RecipeError, match="adamw_8bit can't be cut over devices"):
        strategies.refuse(recipe)
