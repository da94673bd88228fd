"""What the processor can do."""

from __future__ import annotations

import torch


def bf16_units() -> bool | None:
    """Whether it multiplies in bf16 by itself; None: not known, as it isn't an x86 processor."""
    able = torch.cpu.get_capabilities()
    return bool(able["avx512_bf16"] or able["amx_bf16"]) if able["architecture"] == "x86_64" else None
