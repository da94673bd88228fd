"""A causal language model: loading it, adapting it, and its logits only where they are asked for."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...common import attention, quantized
from ...common.adapters import adapted
from ...common.errors import ModelError, unreadable_model
from ...common.losses import (
    TokenLoss,
    chunk_rows,
    linear_cross_entropy,
    linear_log_probs,
    log_probs,
    token_loss,
)
from .config import LanguageModel, LanguageRecipe
from .kernels import apply_liger

log = logging.getLogger(__name__)

FAMILY = "a causal language model"
ADAPTER = "default"
"""PEFT's name of the adapter that is trained."""


def load_tokenizer(section: LanguageModel, weights: Path | None, template: str | None = None) -> Any:
    """The transformers tokenizer of a model, with new tokens and another chat template where the recipe has them.

    Args:
        section: the recipe's model.
        weights: directory of a saved model or adapter; it has its tokenizer beside it, with both.
        template: file of a chat template in place of its own.

    Raises:
        ModelError: no tokenizer there, no such template, or a new token that is not new.
    """
    if weights is not None:
        return _tokenizer(section, str(weights))
    tokenizer = _tokenizer(section, _tokenizer_place(section))
    known = sorted(set(section.new_tokens) & tokenizer.get_vocab().keys())
    if known:
        raise ModelError("the tokenizer has these tokens already", where="model.new_tokens", given=", ".join(known))
    if section.new_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": list(section.new_tokens)}, False)
    if template is not None:
        if not Path(template).is_file():
            raise ModelError("no such file", where="data.chat_template", given=template)
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks go by place, so that the end token is still learned
    return tokenizer


def _tokenizer_place(section: LanguageModel) -> str:
    """Beside a saved adapter, which may have brought new tokens, if one is there; else that of the model."""
    beside = section.adapter is not None and Path(section.adapter, "tokenizer_config.json").is_file()
    return str(section.adapter) if beside else section.path


def _tokenizer(section: LanguageModel, path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error


def load_model(recipe: LanguageRecipe, tokenizer: Any, weights: Path | None) -> tuple[nn.Module, Any]:
    """(what is trained, the transformers model inside): the model itself, or a PEFT model around it.

    Args:
        recipe: path, adapter, quantisation, precision and activation checkpointing.
        tokenizer: may hold more tokens than the model.
        weights: directory of a saved model or adapter to load instead of starting from `model.path`.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    attention.register()
    section = recipe.model
    refuse_adapter(section.path)
    path = section.path if weights is None or section.adapts else str(weights)
    options: dict[str, Any] = {"dtype": torch.bfloat16 if recipe.train.precision == "bf16-true" else torch.float32}
    if section.quantization != "none":
        options["quantization_config"] = BitsAndBytesConfig(
            **quantized.settings(recipe.train.precision, section.adapts)
        )
    try:
        causal = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention.NAME, trust_remote_code=section.trust_remote_code, **options
        )
    except (OSError, ValueError, KeyError) as error:  # KeyError: a family that picks its attention by name
        raise unreadable_model(path, error, FAMILY) from error
    quantized.keep_packing(causal)
    if section.kernels == "liger":
        apply_liger(causal)
    is_base = weights is None or section.adapts
    new = _add_tokens(causal, tokenizer, section) if is_base else []
    model: nn.Module = causal
    if section.adapter is not None:
        model = saved_adapter(causal, weights or section.adapter)
    elif section.lora is not None:
        rows = {"trainable_token_indices": _trained_rows(causal, section, new)} if new else {}
        model = adapted(causal, section.lora, weights, "CAUSAL_LM", **rows)
    if recipe.train.gradient_checkpointing:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    return model, causal


def refuse_adapter(path: str) -> None:
    """Refuse an adapter in the place of the model that it belongs to.

    Raises:
        ModelError: it names both.
    """
    file = Path(path, "adapter_config.json")
    if not file.is_file():
        return
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise ModelError(
        "this is an adapter and not a model",
        where="model.path",
        given=path,
        do=f"model.path={base or 'ITS_MODEL'} model.adapter={path}",
    )


def saved_adapter(causal: Any, path: str | Path) -> nn.Module:
    """The model with a saved adapter around it that is trained.

    Raises:
        ModelError: there is none, or it belongs to another model.
    """
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(causal, str(path), is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"the adapter can't be loaded: {str(error).strip().splitlines()[0]}"
        expected = "an adapter in PEFT's format, of the model at model.path"
        raise ModelError(problem, where="model.adapter", given=path, expected=expected) from error


@torch.no_grad()
def _add_tokens(causal: Any, tokenizer: Any, section: LanguageModel) -> list[int]:
    """Rows for the tokenizer's new tokens; each begins as the mean of the tokens that spelled it before.

    Many models have more rows than tokens; then the vocabulary keeps its size.

    Returns:
        Ids of the tokens that are new.
    """
    rows = causal.get_input_embeddings().weight.shape[0]
    added = tokenizer.convert_tokens_to_ids(list(section.new_tokens))
    new = sorted({*added, *range(rows, len(tokenizer))})
    if not new:
        return []
    if len(tokenizer) > rows:
        causal.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        log.info("the vocabulary has grown from %d to %d tokens", rows, len(tokenizer))
    before = _tokenizer(section, section.path)
    tables = {id(m.weight): m.weight for m in (causal.get_input_embeddings(), causal.get_output_embeddings())}
    for at in new:
        spelled = before(tokenizer.convert_ids_to_tokens(at), add_special_tokens=False).input_ids
        ids = [number for number in spelled if number < rows and number not in new]
        for weight in tables.values():
            old = weight[ids] if ids else weight[: new[0]]
            weight[at] = old.mean(dim=0, dtype=torch.float32).to(weight.dtype)
    return new


def _trained_rows(causal: Any, section: LanguageModel, new: list[int]) -> dict[str, list[int]]:
    """Rows that are trained beside an adapter, by module: those of new tokens, in the output layer too.

    Raises:
        ModelError: the output layer has an adapter of its own or a bias, which PEFT can't combine with such rows.
    """
    lora, head = section.lora, causal.get_output_embeddings()
    assert lora is not None
    names = {id(module): name for name, module in causal.named_modules()}
    embedding, output = names[id(causal.get_input_embeddings())], names[id(head)]
    targets = lora.target_modules
    if isinstance(targets, str):
        is_target = targets != "all-linear" and re.fullmatch(targets, output) is not None
    else:
        is_target = any(output == name or output.endswith(f".{name}") for name in targets)
    if is_target or head.bias is not None:
        raise ModelError(
            "the rows of new tokens can't be trained in this output layer",
            where="model.new_tokens",
            given=f"{output} has {'an adapter' if is_target else 'a bias'}",
            do="leave it out of model.lora.target_modules, or train the whole model",
        )
    is_tied = head.weight is causal.get_input_embeddings().weight
    wanted = (embedding,) if is_tied else (embedding, output)
    whole = {name for name in wanted if name.rpartition(".")[2] in lora.modules_to_save}
    return {name: new for name in wanted if name not in whole}


def decode(causal: Any, data: dict[str, Any], embedded: Tensor | None = None, **more: Any) -> Any:
    """The decoder over a row of N tokens of several documents; its output has `last_hidden_state` [1, N, D].

    Args:
        causal: the transformers model.
        data: of `batch.join` or `batch.join_groups`.
        embedded: [1, N, D] embeddings of the tokens, if they are not the model's own.
        more: further arguments of the decoder.
    """
    if embedded is None:
        embedded = causal.get_input_embeddings()(data["input_ids"][None])
    keys = attention.Keys(data["key_bounds"], data["key_places"]) if "key_places" in data else None
    return causal.get_decoder()(
        inputs_embeds=embedded,
        attention_mask=attention.as_mask(data["bounds"], data["longest"], keys),
        position_ids=data["position_ids"][None],
        use_cache=False,
        **more,
    )


class Head:
    """From last hidden states to the loss, for the places that are asked for only.

    Args:
        causal: the transformers model.
        kind: the loss of a token.
    """

    def __init__(self, causal: Any, kind: TokenLoss):
        config = causal.config.get_text_config()
        scale = getattr(causal, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        softcap = getattr(config, "final_logit_softcapping", None)
        self.module = causal.get_output_embeddings()
        self.kind = TokenLoss(kind.smoothing, kind.z_weight, kind.dynamic, float(scale), softcap)

    def weight(self) -> Tensor | None:
        """[V, D] if the layer is a matrix and no more, perhaps with trained rows: no adapter, no bias, not cut."""
        module = self.module
        if type(module) is nn.Linear and module.bias is None and not hasattr(module.weight, "placements"):
            return module.weight
        rows = getattr(module, "token_adapter", None)
        if rows is not None and not rows.merged and not rows.disable_adapters:
            merged: Tensor = rows.get_merged_weights(rows.active_adapters)
            return merged
        return None

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed loss of hidden states [N, D] for the tokens [N] that should follow."""
        weight = self.weight()
        if weight is not None:
            return linear_cross_entropy(hidden, weight, labels, self.kind)
        rows = chunk_rows(self.module.weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        for at in range(0, max(1, len(hidden)), rows):
            part = hidden[at : at + rows], labels[at : at + rows]
            total = total + checkpoint(self._chunk, *part, use_reentrant=False)
        return total

    def _chunk(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return token_loss(self.logits(hidden), labels, self.kind)

    def log_probs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """[N] log-probabilities, in nats, of the tokens [N] that should follow hidden states [N, D]."""
        weight = self.weight()
        if weight is not None:
            return linear_log_probs(hidden, weight, labels, self.kind)
        rows = chunk_rows(self.module.weight)
        parts = [(hidden[at : at + rows], labels[at : at + rows]) for at in range(0, max(1, len(hidden)), rows)]
        return torch.cat([checkpoint(self._log_probs, *part, use_reentrant=False) for part in parts])

    def _log_probs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return log_probs(self.logits(hidden), labels)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 logits of hidden states [N, D]."""
        logits = self.module(hidden).float() * self.kind.scale
        cap = self.kind.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def statistics(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """([N] plain cross-entropy of each token in nats, [N] whether it is the most probable)."""
        losses, right = [], []
        rows = chunk_rows(self.module.weight)
        for at in range(0, len(hidden), rows):
            logits, wanted = self.logits(hidden[at : at + rows]), labels[at : at + rows]
            losses.append(nn.functional.cross_entropy(logits, wanted, reduction="none"))
            right.append(logits.argmax(dim=1) == wanted)
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return torch.cat(losses or [empty]), torch.cat(right or [empty.bool()])
