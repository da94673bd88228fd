"""How many frames NeMo's encoders make of an example, known without running them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, log2
from typing import Any


def encoded_frames(encoder: Any) -> Callable[[int], int] | None:
    """Frames that an encoder gives for so many feature frames; None for encoders whose lengths aren't known.

    Args:
        encoder: its section of the configuration.
    """
    name = str(encoder.get("_target_")).rpartition(".")[2]
    if name == "ConformerEncoder" and not encoder.get("reduction"):
        return _conformer(encoder)
    if name in ("ConvASREncoder", "ConvASREncoderAdapter"):
        strides = [stride for block in encoder.jasper for stride in (block.stride[0],) * _times(block)]
        return partial(_strided, strides)
    return None


def _times(block: Any) -> int:
    """How often the stride of a block applies."""
    return int(block.get("repeat", 1)) if not block.get("stride_last", False) else 1


def _strided(strides: list[int], frames: int) -> int:
    """Convolutions that keep the length but for their strides."""
    for stride in strides:
        frames = ceil(frames / stride)
    return frames


def _conformer(encoder: Any) -> Callable[[int], int] | None:
    kind, factor = encoder.get("subsampling", "striding"), int(encoder.get("subsampling_factor", 4))
    if not kind or factor < 2:
        return lambda frames: frames
    if kind in ("stacking", "stacking_norm"):
        return partial(_strided, [factor])
    causal = bool(encoder.get("causal_downsampling", False))
    if kind == "vggnet":
        return partial(_strided, [2] * int(log2(factor)))
    if kind in ("striding", "dw_striding"):
        return partial(_halved, times=int(log2(factor)), more=0 if causal else -1)
    return None


def _halved(frames: int, times: int, more: int) -> int:
    """Convolutions of kernel 3 and stride 2 with padding 1 and 1, or (causal) 2 and 1."""
    for _ in range(times):
        frames = (frames + more) // 2 + 1
    return frames
