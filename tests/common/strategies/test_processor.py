"""What a training on the processor is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from luthier.common import strategies
from luthier.common.recipe import TrainSection

KNOWN = {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}


@pytest.mark.parametrize(
    ("precision", "able", "emulates"),
    [
        ("bf16-mixed", {}, True),
        ("bf16-true", {}, True),
        ("bf16-mixed", {"avx512_bf16": True}, False),
        ("bf16-mixed", {"amx_bf16": True}, False),
        ("bf16-mixed", {"architecture": "aarch64"}, False),
        ("32", {}, False),
    ],
)
def test_bf16_without_units_for_it_is_told(
    monkeypatch: pytest.MonkeyPatch, precision: Any, able: dict[str, Any], emulates: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: KNOWN | able)
    section = TrainSection(steps=1, accelerator="cpu", precision=precision)
    assert strategies.emulates_bf16(section) is emulates
