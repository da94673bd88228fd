"""Encoder-decoder networks of transformers: loading, adapting, and running them so that padding changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....common.adapters import adapted
from ....common.errors import ModelError, unreadable_model
from ..real_norm import RealGroupNorm
from .config import Config

FAMILY = "an encoder-decoder model for speech"

PADDED = {"moonshine", "canary"}
"""Model types whose mask makes padding invisible. Of others only examples of one length are run at once."""


def load_processor(path: str) -> Any:
    """Feature extractor and tokenizer of a model's directory.

    Raises:
        ModelError: they can't be read.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    if not hasattr(processor, "feature_extractor") or not hasattr(processor, "tokenizer"):
        raise unreadable_model(path, ValueError("no feature extractor beside a tokenizer"), FAMILY)
    return processor


def load_config(path: str) -> Any:
    """The configuration of an encoder-decoder model's directory.

    Raises:
        ModelError: it is not of a model that transformers has such a form of.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING

    try:
        config: Any = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    if type(config) not in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING or not config.is_encoder_decoder:
        problem = "transformers has no encoder-decoder form of this type of model for speech"
        raise ModelError(problem, where="model.path", given=config.model_type)
    if config.model_type == "whisper":
        problem, do = "Whisper has a task of its own", "set task.kind to asr.whisper"
        raise ModelError(problem, where="task.kind", given="asr.seq2seq", do=do)
    return config


def setting(config: Any, *names: str) -> Any:
    """The first of these settings that a configuration has, its own or its decoder's."""
    for part in (config, getattr(config, "decoder_config", None)):
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return None


def load_model(recipe: Config, weights: Path | None) -> tuple[nn.Module, Any]:
    """(what is trained, transformers' model inside): the model itself, or a PEFT model around it.

    Args:
        recipe: path, adapter, what is frozen, precision.
        weights: directory of a saved model or adapter to load instead of starting from `model.path`.
    """
    from transformers import AutoModelForSpeechSeq2Seq
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    section = recipe.model
    path = section.path if weights is None or section.lora else str(weights)
    config = load_config(path)
    for part in (config, getattr(config, "encoder_config", None), getattr(config, "decoder_config", None)):
        for name in ("attention_dropout", "activation_dropout", "dropout", "dropout_positions"):
            if section.dropout is not None and isinstance(getattr(part, name, None), float | int):
                setattr(part, name, section.dropout)
    dtype = torch.bfloat16 if recipe.train.precision == "bf16-true" else torch.float32
    try:
        speech: Any = AutoModelForSpeechSeq2Seq.from_pretrained(path, config=config, dtype=dtype)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    if config.model_type == "moonshine":
        speech.model.encoder.groupnorm = RealGroupNorm.of(speech.model.encoder.groupnorm)
    model: nn.Module = speech
    if section.lora is not None:
        frozen = r".*encoder\..*" if section.freeze_encoder else None
        model = adapted(speech, section.lora, weights, exclude_modules=frozen)  # PEFT's task types call it otherwise
    if section.freeze_encoder:
        speech.get_encoder().requires_grad_(False)
    if recipe.train.gradient_checkpointing:
        enable = getattr(speech, "activation_checkpointing_enable", speech.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model, speech


def groups(speech: Any, lengths: Tensor) -> list[list[int]]:
    """Rows of a batch that can be run at once."""
    if speech.config.model_type in PADDED:
        return [list(range(len(lengths)))]
    found = defaultdict(list)
    for row, length in enumerate(lengths.tolist()):
        found[length].append(row)
    return list(found.values())


def moonshine_frames(samples: int) -> int:
    """Positions of Moonshine's encoder for so many samples; transformers rounds less than one up to one."""
    for kernel, stride in ((127, 64), (7, 3), (3, 2)):
        samples = (samples - kernel) // stride + 1
    return samples


@contextmanager
def heard(speech: Any, features: Tensor, lengths: Tensor) -> Iterator[dict[str, Tensor]]:
    """The encoder's input for some rows, with a mask under which each gives what it gives alone.

    Args:
        speech: transformers' model.
        features: padded with zeros: samples [B, N], or features [B, T, F].
        lengths: [B] of real audio.
    """
    longest = int(lengths.max())
    features = features[:, :longest].to(next(speech.parameters()).dtype)
    norm: Any = None
    if speech.config.model_type == "moonshine":
        # Its mask takes every 384th sample, which leaves frames over that reach into the padding.
        norm = speech.model.encoder.groupnorm
        norm.real = (lengths - 127) // 64 + 1
        lengths = torch.tensor([384 * moonshine_frames(length) for length in lengths.tolist()], device=lengths.device)
    mask = torch.arange(longest, device=features.device) < lengths[:, None]
    try:
        yield {speech.main_input_name: features, "attention_mask": mask.long()}
    finally:
        if norm is not None:
            norm.real = None


def decode(speech: Any, features: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    """The decoder's last hidden states [B, L, D] for its input [B, L]; the same for a row in any batch.

    Args:
        speech: transformers' model.
        features: padded with zeros: samples [B, N], or features [B, T, F].
        lengths: [B] of real audio.
        ids: start token, control tokens, text; padding after it is not seen.
    """
    parts, order = [], []
    for rows in groups(speech, lengths):
        with heard(speech, features[rows], lengths[rows]) as inputs:
            out = speech.base_model(**inputs, decoder_input_ids=ids[rows], use_cache=False)
        parts.append(out.last_hidden_state)
        order += rows
    found = torch.cat(parts)
    return found if len(parts) == 1 else found[torch.tensor(order, device=found.device).argsort()]
