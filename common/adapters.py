"""PEFT's adapters around a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from .errors import ModelError
from .recipe import LoraSection


def adapted(
    model: Any, section: LoraSection, weights: Path | None, task_type: str | None = None, **more: Any
) -> nn.Module:
    """A model with its own weights frozen and an adapter that is trained.

    Args:
        model: a transformers model.
        section: the adapter.
        weights: directory of a saved adapter to go on with; None: a new one.
        task_type: PEFT's name of what the model does; None: its forward is left as it is.
        more: further fields of PEFT's LoraConfig.

    Raises:
        ModelError: the model has no such modules.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    if weights is not None:
        return PeftModel.from_pretrained(model, str(weights), is_trainable=True)
    target = section.target_modules
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT takes any number
        lora_dropout=section.dropout,
        target_modules=target if isinstance(target, str) else list(target),
        use_dora=section.dora,
        use_rslora=section.rslora,
        init_lora_weights=True if section.init == "default" else section.init,
        modules_to_save=list(section.modules_to_save) or None,
        task_type=task_type,
        **more,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(str(error), where="model.lora.target_modules", given=target) from error
