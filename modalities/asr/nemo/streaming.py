"""The encoder run chunk by chunk, as a live service runs a cache-aware model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.errors import RecipeError
from .config import NemoEvaluate


def set_context(nemo: Any, evaluate: NemoEvaluate) -> None:
    """Give a cache-aware encoder the context of the evaluation.

    Raises:
        RecipeError: the encoder is not cache-aware, or was not trained with this context.
    """
    if evaluate.att_context_size is None and not evaluate.streaming:
        return
    trained = getattr(nemo.encoder, "att_context_size_all", None)
    limited = str(getattr(nemo.encoder, "att_context_style", "")).startswith("chunked_limited")
    if trained is None or not limited:
        raise RecipeError(
            "the encoder is not cache-aware",
            where="evaluate.streaming",
            given=type(nemo.encoder).__name__,
            expected="one with att_context_style: chunked_limited",
        )
    if evaluate.att_context_size is not None:
        size, known = list(evaluate.att_context_size), [list(one) for one in trained]
        if size not in known:
            raise RecipeError(
                "the model was not made for this context",
                where="evaluate.att_context_size",
                given=size,
                expected=f"one of {known}",
            )
        nemo.encoder.set_default_att_context_size(size)


def stream(nemo: Any, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, D, T] of the encoder and its frames [B], computed in chunks of the context's size.

    Args:
        nemo: a model with a cache-aware encoder.
        features: [B, F, T].
        frames: of real audio, [B].
    """
    from nemo.collections.asr.parts.utils.streaming_utils import CacheAwareStreamingAudioBuffer

    encoder = nemo.encoder
    chunks = CacheAwareStreamingAudioBuffer(nemo)
    chunks.buffer, chunks.streams_length = features, frames
    states = encoder.get_initial_cache_state(batch_size=len(features), dtype=features.dtype, device=features.device)
    parts: list[list[Tensor]] = [[] for _ in features]
    for number, (chunk, lengths) in enumerate(chunks):
        encoded, valid, *states = encoder.cache_aware_stream_step(
            processed_signal=chunk,
            processed_signal_length=lengths,
            cache_last_channel=states[0],
            cache_last_time=states[1],
            cache_last_channel_len=states[2],
            keep_all_outputs=chunks.is_buffer_empty(),
            drop_extra_pre_encoded=encoder.streaming_cfg.drop_extra_pre_encoded if number else 0,
        )
        for row, length in enumerate(valid.tolist()):
            parts[row].append(encoded[row, :, :length].T)
    whole = [torch.cat(part) for part in parts]
    counted = torch.tensor([len(part) for part in whole], device=frames.device)
    return torch.nn.utils.rnn.pad_sequence(whole, batch_first=True).transpose(1, 2), counted
