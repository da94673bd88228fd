"""Liger's kernels: refused where they can't run. What they compute is tested on a GPU (test_gpu.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from luthier.common.errors import ModelError


def test_without_a_cuda_device_they_are_refused(task_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="need a CUDA device"):
        task_of("model.kernels=liger")
