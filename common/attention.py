"""Attention over documents that stand one after the other in a row: each attends to itself, and nothing is padded.

The model is given where the documents begin in place of a mask: transformers hands a tensor of four dimensions to every
layer as it is. On a GPU torch's variable-length kernel runs all documents at once; elsewhere those of one length that
stand together run at once. A layer whose `is_causal` is false attends to what follows too, as encoders do.

A document may also see places before its own, such as a prompt that stands once for several answers (`Keys`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import ModelError
from .processor import bf16_units

NAME = "luthier_documents"
"""Name of this attention in transformers' registry (`attn_implementation`)."""

SMALL = 128**2
"""Products of tokens that cost about as much as the overhead of attending to one more group of texts."""

PRODUCTS = 512**2
"""Scores of a head up to which a CPU attends faster in bf16 by plain products: torch's fused kernel takes 2
to 15 times as long for the backward pass there. It wins from about 1,000 tokens on, and takes less memory."""

_watchers: list[list[int | None]] = []


def register() -> None:
    """Make the attention known to transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])  # outside training


@dataclass(frozen=True)
class Keys:
    """What each document sees, where that is more than itself; its own tokens come last, in order.

    Args:
        bounds: [S + 1] int32, where each document's places begin among all K, and K.
        places: [K] int32, places in the row.
    """

    bounds: Tensor
    places: Tensor


def as_mask(bounds: Tensor, longest: int, keys: Keys | None = None) -> Tensor:
    """What a model takes for a mask, [1, 1, `longest`, S + 1]: bounds [S + 1] of documents, of which the longest sees
    so many tokens. The size tells every layer what would else have to be read from the device; it takes no memory.
    With keys it is [1, S + 1, `longest`, 2 (S + 1) + K]: bounds, bounds of the keys, their places."""
    if keys is None:
        return bounds.view(1, 1, 1, -1).expand(1, 1, longest, -1)
    return torch.cat([bounds, keys.bounds, keys.places]).view(1, 1, 1, -1).expand(1, len(bounds), longest, -1)


@contextmanager
def watched() -> Iterator[list[int | None]]:
    """The sliding windows of the layers that attend to documents meanwhile, in order; None: a layer without one."""
    windows: list[int | None] = []
    _watchers.append(windows)
    try:
        yield windows
    finally:
        _watchers.remove(windows)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, by transformers' interface.

    Args:
        module: the layer.
        query: [1, H, N, D].
        key: [1, K, N, D]; H is a multiple of K.
        value: [1, K, N, D].
        attention_mask: bounds of the documents (see `as_mask`). Any other mask, and none, as transformers gives them to
            its SDPA: then the shapes are [B, H, T, D].
        scaling: of the scores; None: 1 / sqrt(D).
        dropout: probability for attention weights.
        sliding_window: earlier tokens that a token sees, itself included; None: all of its document.
        softcap: c in c tanh(score / c) (Gemma 2); None: not capped.

    Returns:
        ([1, N, H, D], None)

    Raises:
        ModelError: a layer that asks for more, such as attention sinks.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError("a layer's attention is not known here", where="model.path", given=name)
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return _masked(module, query, key, value, attention_mask, scaling, dropout, softcap, **kwargs)
    for windows in _watchers:
        windows.append(sliding_window)
    causal = bool(getattr(module, "is_causal", True))
    if sliding_window is not None and not causal:
        raise ModelError("a window on both sides is not known here", where="model.path", given=type(module).__name__)
    bounds, longest = attention_mask[0, 0, 0], attention_mask.shape[2]
    known = bounds
    if (number := attention_mask.shape[1]) > 1:
        bounds, known, places = bounds[:number], bounds[number : 2 * number], bounds[2 * number :]
        key, value = key.index_select(2, places), value.index_select(2, places)
    if torch.is_autocast_enabled(query.device.type):  # norms of queries and keys give float32
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    if _has_kernel(query, value) and not softcap and not dropout:
        window = (-1 if sliding_window is None else sliding_window - 1, 0 if causal else -1)
        return _kernel(query, key, value, bounds, known, longest, scaling, window)[None], None
    key, value = _for_all_heads(query, key, value)
    if not causal:
        return _of_texts(query, key, value, bounds.diff().tolist(), scaling, dropout, softcap), None
    sizes = zip(bounds.diff().tolist(), known.diff().tolist(), strict=True)
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    queries = query.split([length * number for (length, _), number in runs], dim=2)
    keys, values = (tensor.split([seen * number for (_, seen), number in runs], dim=2) for tensor in (key, value))
    parts = [
        _together(q, k, v, number, scaling, dropout, sliding_window, softcap)
        for q, k, v, (_, number) in zip(queries, keys, values, runs, strict=True)
    ]
    return torch.cat(parts, dim=1), None


def _together(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    number: int,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """[1, R T, H, D]: attention of R documents of one length T, [1, H, R T, D], to as many keys each."""
    if number > 1:
        query, key, value = (
            tensor.unflatten(2, (number, -1))[0].transpose(0, 1) for tensor in (query, key, value)
        )  # [R, H, T, D]
    found = _each(query, key, value, scaling, dropout, sliding_window, softcap).transpose(1, 2)
    return found.flatten(0, 1)[None]


def _each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of documents of one length, [R, H, T, D]; they are the last of the keys, which may be more."""
    length, known = query.shape[2], key.shape[2]
    seen, plain = None, softcap is not None or by_products(query.device.type, query.dtype, length * known)
    if plain or known > length or (sliding_window is not None and length > sliding_window):
        before = known - length
        seen = torch.ones(length, known, dtype=torch.bool, device=query.device).tril(before)
        seen = seen if sliding_window is None else seen.triu(before + 1 - sliding_window)
    if plain:
        return _products(query, key, value, seen, scaling, dropout, softcap)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, dropout_p=dropout, is_causal=seen is None, scale=scaling
    )


def similar(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Sizes that stand together in groups, so similar that a group padded to its longest has little more work than its
    texts alone: a group's own overhead is that of about `SMALL` products."""
    group: list[int] = []
    real = 0
    for size in sizes:
        if group and max(*group, size) ** 2 * (len(group) + 1) > 1.5 * (real + size**2) + SMALL:
            yield group
            group, real = [], 0
        group.append(size)
        real += size**2
    yield group


def _of_texts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: list[int],
    scaling: float | None,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    """[1, N, H, D]: attention of texts of these sizes, [1, H, N, D], each token to all of its text."""
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [N, H, D]
    parts, start = [], 0
    for group in similar(sizes):
        lengths = torch.tensor(group, device=query.device)
        seen = torch.arange(max(group), device=query.device) < lengths[:, None]  # [R, T]
        begins = start + lengths.cumsum(0) - lengths
        places = (begins[:, None] + torch.arange(max(group), device=query.device)).clamp(max=query.shape[2] - 1)
        q, k, v = (
            row.index_select(0, places.flatten()).unflatten(0, seen.shape).transpose(1, 2) for row in rows
        )  # [R, H, T, D]
        mask = None if len(set(group)) == 1 else seen[:, None, None, :]
        if softcap is not None or by_products(q.device.type, q.dtype, max(group) ** 2):
            found = _products(q, k, v, mask, scaling, dropout, softcap)
        else:
            found = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, scale=scaling)
        parts.append(found.transpose(1, 2).flatten(0, 1).index_select(0, seen.flatten().nonzero()[:, 0]))
        start += sum(group)
    return torch.cat(parts)[None]


def by_products(device: str, dtype: torch.dtype, scores: int) -> bool:
    """Whether plain products attend faster than torch's fused kernel.

    Args:
        device: its type.
        dtype: of queries, keys and values.
        scores: of a head: queries times keys.
    """
    return device == "cpu" and dtype == torch.bfloat16 and scores <= PRODUCTS and _units() is True


_units = cache(bf16_units)


def _products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scaling: float | None,
    dropout: float,
    cap: float | None,
) -> Tensor:
    """Attention, [B, H, T, D], with scores that may be capped; `seen` is a mask of booleans, or is added to them."""
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if seen is not None:  # not minus infinity: a padded place may see nothing at all, and would become NaN
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~seen, least) if seen.dtype == torch.bool else scores + seen
    weights = scores.softmax(dim=-1).to(value.dtype)  # sums are float32 or finer in any case
    return functional.dropout(weights, dropout) @ value


def _masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with an ordinary mask, such as generation needs it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    length, known = query.shape[2], key.shape[2]
    if mask is None and length > 1:
        mask = torch.ones(length, known, dtype=torch.bool, device=query.device).tril()
    key, value = _for_all_heads(query, key, value)
    return _products(query, key, value, mask, scaling, dropout, softcap).transpose(1, 2).contiguous(), None


def _for_all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each head of the queries."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether torch's variable-length kernel can do it: 16 bits, heads of one size up to 256, Ampere or newer."""
    width = query.shape[3]
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or not width == value.shape[3] <= 256:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0) and _is_known()


@cache
def _is_known() -> bool:
    return find_spec("torch.nn.attention.varlen") is not None  # not in older releases


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    known: Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> Tensor:
    """[N, H, D] by torch's variable-length kernel, which takes the queries for the last of the keys."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, known = bounds.contiguous(), known.contiguous()
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    found = varlen_attn(q, k, v, bounds, known, longest, longest, scale=scaling, window_size=window, enable_gqa=True)
    assert isinstance(found, Tensor)  # a tuple only where more is asked for
    return found
