"""Attention to documents by plain products and by torch's fused kernel: the same values, and each where it is due."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from luthier.common import attention
from luthier.common.attention import Keys, as_mask, attend, by_products

SIZES = (3, 3, 7, 5)
"""Of the documents of a row."""


def bounds(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def prompts() -> Keys:
    """The documents, of which each sees the first one's two first tokens too."""
    begins = bounds(SIZES).tolist()
    places = [torch.tensor([0, 1, *range(begin, end)], dtype=torch.int32) for begin, end in pairwise(begins)]
    return Keys(bounds(tuple(len(own) for own in places)), torch.cat(places))


@pytest.mark.parametrize(
    ("causal", "window", "keys"),
    [(True, None, None), (True, 2, None), (True, None, prompts()), (False, None, None)],
    ids=["causal", "window", "prompt", "both ways"],
)
def test_products_give_what_the_fused_kernel_gives(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: int | None, keys: Keys | None
) -> None:
    """In float64, so that rounding hides nothing; forward and gradients."""
    layer = nn.Module()
    layer.is_causal = causal
    found = []
    for products in (True, False):
        monkeypatch.setattr(attention, "by_products", lambda *_, chosen=products: chosen)
        torch.manual_seed(0)
        inputs = [torch.randn(1, heads, sum(SIZES), 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
        mask = as_mask(bounds(SIZES), max(SIZES), keys)
        out, _ = attend(layer, *inputs, mask, sliding_window=window)
        found.append((out, torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "units", "due"),
    [
        ("cpu", torch.bfloat16, 512, True, True),
        ("cpu", torch.bfloat16, 513, True, False),
        ("cpu", torch.bfloat16, 8, False, False),
        ("cpu", torch.bfloat16, 8, None, False),
        ("cpu", torch.float32, 8, True, False),
        ("cuda", torch.bfloat16, 8, True, False),
    ],
)
def test_products_are_for_short_texts_in_bf16_on_processors_with_units(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, tokens: int, units: bool | None, due: bool
) -> None:
    monkeypatch.setattr(attention, "_units", lambda: units)
    assert by_products(device, dtype, tokens**2) is due
