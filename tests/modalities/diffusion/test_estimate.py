"""`luthier estimate` of an image adapter whose pipeline is there without its weights."""

from __future__ import annotations

from typing import Any

import pytest

from luthier.common.estimate import estimate

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_an_adapter_is_counted_without_the_weights(name: str, precision: str, make_recipe: Any, make_task: Any) -> None:
    """Where only the adapter is trained in bf16, the base is kept in 2 bytes each."""
    settings = {"train": {"precision": precision}}
    found = estimate(make_recipe(name, **settings), devices=1)
    task = make_task(name, **settings)
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
    assert found["model"]["trained"] == sum(parameter.numel() for parameter in trained)
    memory = found["memory"]["auto"]
    assert memory["gradients"] == sum(parameter.numel() * parameter.element_size() for parameter in trained)
    parts = [*task.parts.trained().values(), *task.parts.frozen().values()]
    own = sum(p.numel() * p.element_size() for part in parts for p in (*part.parameters(), *part.buffers()))
    assert memory["weights"] == pytest.approx(own, rel=0.01)
