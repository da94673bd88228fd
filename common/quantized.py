"""A frozen base in 4 bits, for an adapter to be trained on (Dettmers et al., QLoRA, arXiv:2305.14314).

Weights are 4-bit NormalFloat in blocks, whose scales are quantised too; they are multiplied in the precision of the
training. bitsandbytes does it, on CUDA devices and, slowly, on the CPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from .errors import ModelError, missing_extra

BYTES = 0.516
"""Bytes of a weight, with its doubly quantised scale (the paper's 4.127 bits)."""


def settings(precision: str, adapts: bool) -> dict[str, Any]:
    """What `transformers.BitsAndBytesConfig` is made of.

    Args:
        precision: `train.precision`.
        adapts: whether an adapter is trained.

    Raises:
        ModelError: the base itself would be trained.
        LuthierError: bitsandbytes is not installed.
    """
    if not adapts:
        raise ModelError(
            "4-bit weights can't be trained",
            where="model.quantization",
            given="nf4 without an adapter",
            do="train an adapter: model.lora",
        )
    if find_spec("bitsandbytes") is None:
        raise missing_extra("bitsandbytes", "quantized")
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": _dtype(precision),
    }


def quantise(module: nn.Module, precision: str, adapts: bool) -> None:
    """Put the weights of all linear layers of a module into 4 bits, in place: what transformers does while it loads.

    Args:
        module: frozen.
        precision, adapts: as for `settings`.
    """
    settings(precision, adapts)
    import bitsandbytes

    layers: Any = bitsandbytes.nn
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear:
                continue
            device, bias = layer.weight.device, layer.bias is not None
            small = layers.Linear4bit(
                layer.in_features, layer.out_features, bias, _dtype(precision), True, "nf4", device=torch.device("meta")
            )
            weight = layer.weight.detach()
            small.weight = layers.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4")
            small.bias = layer.bias
            setattr(parent, name, small.to(device))
    module.is_loaded_in_4bit = True  # type: ignore[assignment]  # by which PEFT chooses its layers
    keep_packing(module)


def keep_packing(module: nn.Module) -> None:
    """Keep 4-bit weights as they are. On processors with units for bf16 bitsandbytes else packs them anew at the first
    evaluation, with scales in bf16, so that the rest of the training would have another base.

    Args:
        module: with layers of bitsandbytes.
    """
    for layer in module.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _dtype(precision: str) -> torch.dtype:
    return {"32": torch.float32, "16-mixed": torch.float16}.get(precision, torch.bfloat16)
