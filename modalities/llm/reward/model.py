"""A language model with a head of scores, as transformers' `ForSequenceClassification`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....common import attention
from ....common.adapters import adapted
from ....common.errors import ModelError, unreadable_model
from ..batch import Group, join_groups
from ..model import decode, quantised
from ..probe import check_layers, check_windows, refusal
from ..tokens import Document


def load_scorer(recipe: Any, labels: int, padding: int | None, weights: Path | None) -> tuple[nn.Module, Any]:
    """(what is trained, the transformers model inside): the model itself, or a PEFT model around it, which trains and
    saves the head as a whole.

    Args:
        recipe: path, adapter, quantisation, precision and activation checkpointing.
        labels: scores of a sequence.
        padding: id of the padding, told to those who use the model.
        weights: directory of a saved model or adapter to load instead of starting from `model.path`.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

    disable_progress_bar()
    attention.register()
    section = recipe.model
    path = section.path if weights is None or section.lora else str(weights)
    options: dict[str, Any] = {"dtype": torch.bfloat16 if recipe.train.precision == "bf16-true" else torch.float32}
    if section.quantization != "none":
        options["quantization_config"] = quantised(section)
        options["quantization_config"].llm_int8_skip_modules = ["score"]
    verbosity = get_verbosity()
    set_verbosity_error()  # it warns that the head is new
    try:
        scorer = AutoModelForSequenceClassification.from_pretrained(
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
    if not isinstance(getattr(scorer, "score", None), nn.Module):
        raise ModelError("the model has no head of scores", where="model.path", given=type(scorer).__name__)
    scorer.config.get_text_config().pad_token_id = scorer.config.pad_token_id = padding
    model: nn.Module = scorer
    if section.lora is not None:
        model = adapted(scorer, section.lora, weights, "SEQ_CLS")
    if recipe.train.gradient_checkpointing:
        scorer.gradient_checkpointing_enable({"use_reentrant": False})
    return model, scorer


def scores(scorer: Any, data: dict[str, Any]) -> Tensor:
    """[A, labels] float32 scores of the documents of a batch, read at their last tokens, which are told by place.

    Args:
        scorer: the transformers model.
        data: of `batch.join_groups`.
    """
    hidden = decode(scorer, data).last_hidden_state[0]
    found: Tensor = scorer.score(hidden[data["last"]]).float()
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
        expected = torch.cat([scorer(input_ids=one, use_cache=False).logits.float() for one in alone])
        with attention.watched() as windows:
            found = scores(scorer, data)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise refusal(scorer, f"it can't be run on them: {error}") from error
    check_windows(scorer, windows, max_length)
    bound = float(expected.abs().max()) * (1e-3 if scorer.dtype == torch.float32 else 0.2)
    if bool(((found - expected).abs() > bound).any()):
        raise refusal(scorer, "its scores are not those of each alone")
