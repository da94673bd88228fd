"""Speech-LLMs of transformers: loading, adapting and freezing them, and their last hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....common.adapters import adapted
from ....common.errors import ModelError, unreadable_model
from .config import Config

FAMILY = "a speech-LLM"
MODELS = ("qwen2_audio",)
"""Model types that are trained here."""


def load_config(path: str) -> Any:
    """The configuration of a speech-LLM's directory.

    Raises:
        ModelError: it is of another type.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    if config.model_type not in MODELS:
        problem, expected = "this type of model is not trained here", ", ".join(MODELS)
        raise ModelError(problem, where="model.path", given=config.model_type, expected=expected)
    return config


def load_processor(path: str) -> Any:
    """Feature extractor, tokenizer and chat template of a model's directory."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error


def load_model(recipe: Config, weights: Path | None) -> tuple[nn.Module, Any]:
    """(what is trained, transformers' model inside): the model itself, or a PEFT model around it.

    Args:
        recipe: path, adapter, what is frozen, precision.
        weights: directory of a saved model or adapter to load instead of starting from `model.path`.
    """
    from transformers import AutoModelForMultimodalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    section = recipe.model
    path = section.path if weights is None or section.lora else str(weights)
    config = load_config(path)
    dtype = torch.bfloat16 if recipe.train.precision == "bf16-true" else torch.float32
    try:
        speech: Any = AutoModelForMultimodalLM.from_pretrained(path, config=config, dtype=dtype)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    frozen = {
        "audio_tower": section.freeze_encoder,
        "language_model": section.freeze_language_model,
        "lm_head": section.freeze_language_model,
    }
    names = [name for name, kept in frozen.items() if kept]
    model: nn.Module = speech
    if section.lora is not None:
        excluded = "|".join(rf"(.*\.)?{name}(\..*)?" for name in names) or None
        model = adapted(speech, section.lora, weights, exclude_modules=excluded)
    for name, parameter in speech.named_parameters():
        if any(part in name.split(".") for part in names):
            parameter.requires_grad_(False)
    if recipe.train.gradient_checkpointing:
        speech.gradient_checkpointing_enable({"use_reentrant": False})
    return model, speech


def states(speech: Any, ids: Tensor, mask: Tensor, heard: Mapping[str, Tensor]) -> Tensor:
    """Last hidden states [B, L, D] of a batch.

    Args:
        speech: transformers' model.
        ids: [B, L] with an audio token for each of the audio's positions.
        mask: [B, L] of real tokens.
        heard: the audio, as the model's processor gives it.
    """
    out = speech.base_model(input_ids=ids, attention_mask=mask, use_cache=False, **heard)
    found: Tensor = out.last_hidden_state
    return found
