"""A language model with a head of scores, as transformers' `ForSequenceClassification` or `ForTokenClassification`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....common import attention, quantized
from ....common.adapters import adapted
from ....common.errors import ModelError, unreadable_model
from ..batch import Group, join_groups
from ..model import decode, refuse_adapter
from ..probe import check_layers, check_windows, refusal
from ..tokens import Document

HEADS = ("score", "classifier")
"""Names that transformers' classes have for the head."""


def load_scorer(
    recipe: Any, labels: int, padding: int | None, weights: Path | None, per_token: bool = False
) -> tuple[nn.Module, Any]:
    """(what is trained, the transformers model inside): the model itself, or a PEFT model around it, which trains and
    saves the head as a whole.

    Args:
        recipe: path, adapter, quantisation, precision and activation checkpointing.
        labels: scores of a sequence, or of a token.
        padding: id of the padding, told to those who use the model.
        weights: directory of a saved model or adapter to load instead of starting from `model.path`.
        per_token: whether tokens are scored, and not sequences.
    """
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        BitsAndBytesConfig,
    )
    from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

    disable_progress_bar()
    attention.register()
    section = recipe.model
    refuse_adapter(section.path)
    family: Any = AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification
    path = section.path if weights is None or section.lora else str(weights)
    options: dict[str, Any] = {"dtype": torch.bfloat16 if recipe.train.precision == "bf16-true" else torch.float32}
    if section.quantization != "none":
        bits = quantized.settings(recipe.train.precision, section.adapts)
        options["quantization_config"] = BitsAndBytesConfig(**bits, llm_int8_skip_modules=[*HEADS])
    verbosity = get_verbosity()
    set_verbosity_error()  # it warns that the head is new
    try:
        scorer = family.from_pretrained(
            path,
            num_labels=labels,
            attn_implementation=attention.NAME,
            trust_remote_code=section.trust_remote_code,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise unreadable_model(path, error, "a language model") from error
    finally:
        set_verbosity(verbosity)
    head(scorer)
    scorer.config.get_text_config().pad_token_id = scorer.config.pad_token_id = padding
    model: nn.Module = scorer
    if section.lora is not None:
        model = adapted(scorer, section.lora, weights, "TOKEN_CLS" if per_token else "SEQ_CLS")
    if recipe.train.gradient_checkpointing:
        scorer.gradient_checkpointing_enable({"use_reentrant": False})
    return model, scorer


def head(scorer: Any) -> nn.Module:
    """The layer that scores hidden states.

    Raises:
        ModelError: there is none.
    """
    for name in HEADS:
        found = getattr(scorer, name, None)
        if isinstance(found, nn.Module):
            return found
    raise ModelError("the model has no head of scores", where="model.path", given=type(scorer).__name__)


def scores(scorer: Any, data: dict[str, Any], places: Tensor | None = None) -> Tensor:
    """[A, labels] float32 scores, read at the last tokens of the A documents of a batch, which are told by place, or at
    other places [A]. Without the dropout that some classes have before their head.

    Args:
        scorer: the transformers model.
        data: of `batch.join` or `batch.join_groups`.
        places: default: `last` of `batch.join_groups`.
    """
    hidden = decode(scorer, data).last_hidden_state[0]
    found: Tensor = head(scorer)(hidden[data["last"] if places is None else places]).float()
    return found


@torch.no_grad()
def probe_scores(scorer: Any, max_length: int) -> None:
    """Compare the scores of documents in one row, with and without a shared begin, with those that the model itself
    gives for each alone.

    Raises:
        ModelError: they are not the same, or the model has layers that can't keep documents apart.
    """
    scorer.eval()
    check_layers(scorer)
    vocabulary, device = scorer.get_input_embeddings().weight.shape[0], scorer.device
    ids = torch.arange(1, 10).int().numpy() % vocabulary
    parts = [Document(part, part >= 0) for part in (ids[:6], ids[[0, 1, 2, 6, 7, 8, 5]], ids[4:8])]
    data = join_groups([Group.of(parts[:2]), Group.of(parts[2:])])
    data = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in data.items()}
    try:
        alone = [torch.from_numpy(part.ids).long().to(device)[None] for part in parts]
        logits = [scorer(input_ids=one, use_cache=False).logits.float() for one in alone]
        expected = torch.cat([one if one.ndim == 2 else one[:, -1] for one in logits])
        with attention.watched() as windows:
            found = scores(scorer, data)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise refusal(scorer, f"it can't be run on them: {error}") from error
    check_windows(scorer, windows, max_length)
    bound = float(expected.abs().max()) * (1e-3 if scorer.dtype == torch.float32 else 0.2)
    if bool(((found - expected).abs() > bound).any()):
        raise refusal(scorer, "its scores are not those of each alone")
