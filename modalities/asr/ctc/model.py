"""CTC networks of transformers: loading and adapting them, and running them so that padding changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ....common.adapters import adapted
from ....common.errors import ModelError, unreadable_model
from ..real_norm import RealGroupNorm
from .config import Config
from .vocabulary import FAMILY, Vocabulary

PADDED = {
    "wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "wav2vec2-bert", "parakeet_ctc"
}  # fmt: skip
"""Model types whose mask makes padding invisible. Others are run example by example."""

HEADS = ("lm_head", "ctc_head")
_LENGTHS = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")


def load_model(recipe: Config, weights: Path | None, vocabulary: Vocabulary) -> tuple[nn.Module, Any]:
    """(what is trained, transformers' model inside): the model itself, or a PEFT model around it.

    Args:
        recipe: path, adapter, what is frozen, precision.
        weights: directory of a saved model or adapter to load instead of starting from `model.path`.
        vocabulary: its rows are those of the output layer.
    """
    section = recipe.model
    ctc = _loaded(recipe, weights, len(vocabulary.tokens))
    if vocabulary.rows is not None:
        resize_head(ctc, vocabulary.rows)
    if head(ctc)[1].weight.shape[0] < len(vocabulary.tokens):
        given = f"{head(ctc)[1].weight.shape[0]} rows for {len(vocabulary.tokens)} tokens"
        raise ModelError("the output layer has fewer rows than the vocabulary", where="model.path", given=given)
    ctc.config.pad_token_id = int(vocabulary.tokenizer.pad_token_id)  # the blank of transformers' own loss
    _count_real_frames(ctc)
    model: nn.Module = ctc
    if section.lora is not None:
        lora, name = section.lora, head(ctc)[0]
        if vocabulary.rows is not None and name not in lora.modules_to_save:
            lora = lora.model_copy(update={"modules_to_save": (*lora.modules_to_save, name)})
        model = adapted(ctc, lora, weights)  # PEFT's task types call a model in ways that these have not
    _freeze(recipe, ctc)
    if recipe.train.gradient_checkpointing:
        enable = getattr(ctc, "activation_checkpointing_enable", ctc.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model, ctc


def load_config(path: str) -> Any:
    """The configuration of a CTC model's directory.

    Raises:
        ModelError: it is not of a model that transformers has a CTC form of.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    kind = model_class(config)
    if kind is None or not any(hasattr(kind, name) for name in _LENGTHS):
        raise ModelError(
            "this type of model is not supported with CTC",
            where="model.path",
            given=config.model_type,
            expected=", ".join(sorted(PADDED)),
        )
    return config


def model_class(config: Any) -> Any:
    """transformers' class of a configuration for CTC, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CTC_MAPPING

    return MODEL_FOR_CTC_MAPPING.get(type(config), None)


def frames(config: Any, lengths: Tensor) -> Tensor:
    """Frames that a model makes of inputs of these lengths, by transformers' own formula, without a model.

    Args:
        config: the model's configuration.
        lengths: samples or feature frames, whichever the model takes.
    """
    kind = model_class(config)
    formula = next(getattr(kind, name) for name in _LENGTHS if hasattr(kind, name))
    found: Tensor = formula(SimpleNamespace(config=config), lengths)
    return found.long().clamp(min=0)


def head(ctc: Any) -> tuple[str, nn.Linear | nn.Conv1d]:
    """Name and module of the output layer."""
    for name in HEADS:
        if (found := getattr(ctc, name, None)) is not None:
            return name, getattr(found, "original_module", found)
    raise ModelError("the model's output layer is not known", given=type(ctc).__name__, expected=" or ".join(HEADS))


def resize_head(ctc: Any, rows: Sequence[int | None]) -> None:
    """Give the output layer these rows: old ones by their number, new ones for None.

    A new row starts as small random weights, as transformers starts a layer. The bias of new rows is 0.
    """
    name, old = head(ctc)
    weight, bias = old.weight.detach(), old.bias.detach() if old.bias is not None else None
    new = copy.deepcopy(old)
    shape = (len(rows), *weight.shape[1:])
    new.weight = nn.Parameter(torch.empty(shape, dtype=weight.dtype).normal_(0, ctc.config.initializer_range))
    fresh = nn.Parameter(torch.zeros(len(rows), dtype=weight.dtype if bias is None else bias.dtype))
    if bias is not None:
        new.bias = fresh
    kept = [(place, row) for place, row in enumerate(rows) if row is not None and row < len(weight)]
    if kept:
        places, taken = (torch.tensor(column) for column in zip(*kept, strict=True))
        with torch.no_grad():
            new.weight[places] = weight[taken]
            if bias is not None:
                fresh[places] = bias[taken]
    setattr(new, "out_features" if isinstance(new, nn.Linear) else "out_channels", len(rows))
    setattr(ctc, name, new)
    ctc.config.vocab_size = len(rows)


def run(ctc: Any, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] and the frames [B] of each row that are of real audio; the same for a row in any batch.

    Args:
        ctc: transformers' model.
        features: padded with zeros: samples [B, N], or features [B, T, F].
        lengths: [B] of real audio.
    """
    features = features.to(next(ctc.parameters()).dtype)
    if bool((lengths == features.shape[1]).all()):
        logits = ctc(features).logits
        return logits, frames(ctc.config, lengths).clamp(max=logits.shape[1])
    if ctc.config.model_type in PADDED:
        return _run_masked(ctc, features, lengths)
    rows = [ctc(row[None, :length]).logits[0] for row, length in zip(features, lengths.tolist(), strict=True)]
    found = torch.tensor([len(row) for row in rows], device=lengths.device)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.minimum(frames(ctc.config, lengths), found)


def _run_masked(ctc: Any, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.arange(features.shape[1], device=lengths.device) < lengths[:, None]
    norms = [module for module in ctc.modules() if isinstance(module, RealGroupNorm)]
    for norm in norms:  # it stands after the first convolution
        norm.real = (lengths - ctc.config.conv_kernel[0]) // ctc.config.conv_stride[0] + 1
    try:
        logits = ctc(features, attention_mask=mask.long()).logits
    finally:
        if not torch.is_grad_enabled():  # checkpointed layers run again in the backward pass
            for norm in norms:
                norm.real = None
    return logits, frames(ctc.config, lengths).clamp(max=logits.shape[1])


def _loaded(recipe: Config, weights: Path | None, size: int) -> Any:
    from transformers import AutoModelForCTC
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    section = recipe.model
    path = section.path if weights is None or section.lora else str(weights)
    config = load_config(path)
    _set(config, recipe)
    if config.vocab_size is None:  # of a model that was only pretrained
        config.vocab_size = size
    dtype = torch.bfloat16 if recipe.train.precision == "bf16-true" else torch.float32
    more: dict[str, Any] = {}
    if section.language is not None and path == section.path:
        more = {"target_lang": section.language, "ignore_mismatched_sizes": True}
    try:
        ctc = AutoModelForCTC.from_pretrained(path, config=config, dtype=dtype, **more)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    if section.train_adapter and section.language is None and weights is None:
        ctc.init_adapter_layers()
    return ctc


def _set(config: Any, recipe: Config) -> None:
    """Masks, dropout and LayerDrop in the model's settings, as the recipe says."""
    section, parts = recipe.model, [config, getattr(config, "encoder_config", config)]
    mask = section.mask
    if mask is not None and not hasattr(config, "mask_time_prob"):
        problem = "this type of model has no masks of its own"
        raise ModelError(problem, where="model.mask", given=config.model_type, do="use data.augment's masks")
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = mask is not None
    if mask is not None:
        config.mask_time_prob, config.mask_time_length = mask.time_probability, mask.time_length
        config.mask_feature_prob, config.mask_feature_length = mask.feature_probability, mask.feature_length
    for part in parts:
        if hasattr(part, "layerdrop"):
            part.layerdrop = section.layerdrop
        for name in ("attention_dropout", "hidden_dropout", "activation_dropout", "feat_proj_dropout", "dropout"):
            if section.dropout is not None and isinstance(getattr(part, name, None), float | int):
                setattr(part, name, section.dropout)
    if section.train_adapter and getattr(config, "adapter_attn_dim", None) is None:
        raise ModelError("the model has no adapters", where="model.train_adapter", given=config.model_type)


def _freeze(recipe: Config, ctc: Any) -> None:
    section, base = recipe.model, ctc.base_model
    name = head(ctc)[0]
    if section.train_adapter:
        trained = {id(parameter) for parameter in ctc._get_adapters().values()}
        for parameter in ctc.parameters():
            parameter.requires_grad_(id(parameter) in trained)
    elif section.freeze_encoder:
        for key, parameter in ctc.named_parameters():
            if not key.startswith(f"{name}."):
                parameter.requires_grad_(False)
    convolutions = getattr(base, "feature_extractor", None)
    if convolutions is not None and section.freeze_feature_encoder:
        convolutions._freeze_parameters()
    for key, parameter in ctc.named_parameters():  # without masks it gets no gradient, which DDP would wait for
        if key.endswith("masked_spec_embed") and not (section.mask and section.mask.time_probability):
            parameter.requires_grad_(False)


def _count_real_frames(ctc: Any) -> None:
    if ctc.config.model_type not in PADDED:
        return
    for module in list(ctc.modules()):
        norm = getattr(module, "layer_norm", None)
        if type(norm) is nn.GroupNorm:
            module.layer_norm = RealGroupNorm.of(norm)
