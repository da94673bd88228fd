"""Fused kernels in place of a model's own norms, rotary positions and gated layers (Hsu et al., Liger Kernel,
arXiv:2410.10989). The loss is ours on any device."""

from __future__ import annotations

from typing import Any

import torch

from ...common.errors import ModelError, missing_extra


def apply_liger(causal: Any) -> None:
    """Put Liger's kernels into a transformers model, in place.

    Raises:
        ModelError: there is no CUDA device, or Liger has no kernels for this family.
        LuthierError: liger-kernel is not installed.
    """
    where = {"where": "model.kernels", "given": "liger", "do": "model.kernels=torch"}
    if not torch.cuda.is_available():
        raise ModelError("Liger's kernels need a CUDA device", **where)
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise missing_extra("liger-kernel", "liger") from error
    family = causal.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(f"Liger has no kernels for {family}", **where)
    _apply_liger_kernel_to_instance(model=causal, cross_entropy=False, fused_linear_cross_entropy=False)
