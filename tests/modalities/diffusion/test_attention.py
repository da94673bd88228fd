"""Attention of a U-Net by plain products and by the fused kernel: the same values, and each where it is due."""

from __future__ import annotations

from typing import Any

import diffusers as df
import pytest
import torch

from luthier.common import attention
from luthier.modalities.diffusion.attention import ByLength


def told(denoiser: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two its layers call, in order."""
    found: list[str] = []

    def telling(name: str, plain: Any) -> Any:
        def call(*args: Any) -> Any:
            found.append(name)
            return plain(*args)

        return call

    for one in denoiser.attn_processors.values():
        for name in ("products", "fused"):
            monkeypatch.setattr(one, name, telling(name, getattr(one, name)))
    return found


def test_a_pipeline_s_layers_choose(make_task: Any) -> None:
    processors = make_task("sd").parts.denoiser.attn_processors
    assert processors
    assert all(isinstance(one, ByLength) for one in processors.values())


@pytest.mark.parametrize(("precision", "due"), [("32", "fused"), ("bf16-mixed", "products")])
def test_a_training_in_bf16_on_a_processor_with_units_uses_products(
    make_task: Any, batch_of: Any, monkeypatch: pytest.MonkeyPatch, precision: Any, due: str
) -> None:
    monkeypatch.setattr(attention, "_units", lambda: True)
    task = make_task("sd", train={"precision": precision})
    used = told(task.parts.denoiser, monkeypatch)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        task.loss(batch_of(task))
    assert set(used) == {due}
    used.clear()
    monkeypatch.setattr(attention, "PRODUCTS", 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        task.loss(batch_of(task))
    assert set(used) == {"fused"}


@pytest.mark.parametrize("shape", [(2, 16, 8), (2, 8, 4, 4)])
@pytest.mark.parametrize("text", [None, 5])
def test_both_give_the_same(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], text: int | None) -> None:
    """In float32, so that rounding hides nothing; forward and gradient."""
    torch.manual_seed(0)
    layer = df.models.attention_processor.Attention(
        8, cross_attention_dim=6 if text else None, heads=2, dim_head=4, processor=ByLength()
    )
    found = []
    for products in (True, False):
        monkeypatch.setattr("luthier.modalities.diffusion.attention.by_products", lambda *_, chosen=products: chosen)
        torch.manual_seed(1)
        hidden = torch.randn(shape, requires_grad=True)
        out = layer(hidden, None if text is None else torch.randn(2, text, 6))
        (gradient,) = torch.autograd.grad(out.square().sum(), hidden)
        found.append((out, gradient))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
