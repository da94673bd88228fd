"""What runs on a GPU only: the variable-length kernel, and a base in 4 bits."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from luthier.common import attention
from luthier.common.training.run import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [5, 1, 300, 64]


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_the_kernel_equals_one_document_after_the_other(window: int | None, scaling: float | None, monkeypatch) -> None:
    """Values and gradients, in bfloat16: 8 bits of mantissa, so that 1% of the largest is what can be asked."""
    torch.manual_seed(0)
    total = sum(SIZES)
    tensors = [torch.randn(1, heads, total, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    given = [tensor.requires_grad_() for tensor in tensors]
    bounds = torch.tensor([0, *torch.tensor(SIZES).cumsum(0).tolist()], device="cuda", dtype=torch.int32)

    def run() -> tuple[Tensor, ...]:
        mask = attention.as_mask(bounds, max(SIZES))
        found, _ = attention.attend(nn.Linear(1, 1), *given, mask, sliding_window=window, scaling=scaling)
        weights = torch.linspace(-1, 1, found.numel(), device="cuda").view_as(found)
        return found, *torch.autograd.grad((found.float() * weights).sum(), given)

    assert attention._has_kernel(given[0], given[2])
    ours = run()
    monkeypatch.setattr(attention, "_has_kernel", lambda *_: False)
    for one, other in zip(ours, run(), strict=True):
        assert float((one.float() - other.float()).abs().max()) <= 0.01 * float(other.float().abs().max())


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "mixtral"])
def test_a_run_on_a_gpu_is_that_on_the_cpu(family: str, recipe_of, left) -> None:
    """In float32 to 1e-3, as sums are in another order; in bfloat16 to 3%."""
    overrides = ("data.batch.tokens=150", "data.batch.packing=true", "train.epochs=2")
    cpu = left.values(train(recipe_of(*overrides, model=family, output="cpu")).folder)
    gpu = left.values(train(recipe_of(*overrides, "train.accelerator=gpu", model=family, output="gpu")).folder)
    assert gpu == pytest.approx(cpu, rel=1e-3)
    half = recipe_of(*overrides, "train.accelerator=gpu", "train.precision=bf16-mixed", model=family, output="half")
    assert left.values(train(half).folder) == pytest.approx(cpu, rel=0.03)


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_ligers_kernels_train_as_torch_does(recipe_of, left) -> None:
    plain = left.values(train(recipe_of("train.accelerator=gpu", "train.epochs=2", output="plain")).folder)
    fused = recipe_of("train.accelerator=gpu", "train.epochs=2", "model.kernels=liger", output="fused")
    assert left.values(train(fused).folder) == pytest.approx(plain, rel=1e-3)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_qlora_trains_an_adapter_on_a_base_in_4_bits(recipe_of, left, task_of) -> None:
    overrides: tuple[Any, ...] = (
        "model.quantization=nf4", "model.lora.rank=4", "model.lora.target_modules=all-linear",
        "train.accelerator=gpu", "train.precision=bf16-mixed", "train.gradient_checkpointing=true",
        "data.batch.examples=4", "train.epochs=4",
    )  # fmt: skip
    made = task_of(*overrides)
    assert any(parameter.dtype == torch.uint8 for parameter in made.task.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in made.task.parameters() if parameter.requires_grad)
    folder = train(recipe_of(*overrides)).folder
    losses = left.values(folder)
    assert losses[-1] < 0.9 * losses[0]
    moved = [value for name, value in left.weights(folder).items() if "lora_B" in name]
    assert all(float(value.abs().max()) > 0 for value in moved)
