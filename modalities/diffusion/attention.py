"""Attention of a U-Net, by what is faster where it runs."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import Tensor

from ...common.attention import by_products


class ByLength:
    """diffusers' two processors of a layer: plain products, or torch's fused kernel. They give the same values within
    rounding."""

    def __init__(self) -> None:
        self.products, self.fused = AttnProcessor(), AttnProcessor2_0()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """As diffusers calls them, by these names: hidden states [B, T, C] or [B, C, H, W], those of the text
        [B, L, E]."""
        device = hidden_states.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden_states.dtype
        queries = hidden_states.shape[1] if hidden_states.ndim == 3 else hidden_states[0, 0].numel()
        keys = queries if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        attend = self.products if by_products(device, dtype, queries * keys) else self.fused
        found: Tensor = attend(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        return found


def by_length(denoiser: Any) -> None:
    """Let the layers of a U-Net that use the fused kernel choose; other denoisers stay as they are."""
    if not hasattr(denoiser, "set_attn_processor"):
        return
    known = denoiser.attn_processors
    denoiser.set_attn_processor(
        {name: ByLength() if type(one) is AttnProcessor2_0 else one for name, one in known.items()}
    )
