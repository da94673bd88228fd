"""Whether a model can be trained on documents that stand in one row: asked of the model itself, once, on a few tokens.

Families differ in what they add to attention, positions and logits. What is not known here would give a wrong loss in
silence, so it is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common import attention
from ...common.errors import ModelError
from ...common.losses import logits_of
from .batch import Group, join, join_groups
from .model import Head, decode
from .tokens import Document

SIZES = (3, 4)
"""Tokens of the documents that are tried."""


@torch.no_grad()
def probe(causal: Any, head: Head, max_length: int) -> None:
    """Compare the logits of documents in one row with those that the model gives for each alone.

    Args:
        causal: the transformers model, with our attention.
        head: makes logits here.
        max_length: longest document of the training, in tokens.

    Raises:
        ModelError: they are not the same, or the model has layers that can't keep documents apart.
    """
    causal.eval()  # training sets the modes that it needs
    check_layers(causal)
    device, vocabulary = causal.device, causal.get_input_embeddings().weight.shape[0]
    ids = torch.arange(sum(SIZES)) % vocabulary
    parts = [Document(part.int().numpy(), part.bool().numpy()) for part in ids.split(SIZES)]
    data = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in join(parts).items()}
    try:
        alone = [
            causal(input_ids=part.to(device)[None], use_cache=False).logits[0].float() for part in ids.split(SIZES)
        ]
        with attention.watched() as windows:
            hidden = decode(causal, data).last_hidden_state[0]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise refusal(causal, f"it can't be run on them: {error}") from error
    check_windows(causal, windows, max_length)
    weight = head.weight()
    found = [head.logits(hidden)] + ([] if weight is None else [logits_of(hidden, weight, head.kind)])
    expected = torch.cat(alone)
    size = float(expected.abs().max())
    bound = size * (1e-3 if causal.dtype == torch.float32 else 0.2)  # lower precisions round their sums otherwise
    for logits in found:
        difference = (logits - expected).abs().amax(dim=1)
        if bool((difference[: SIZES[0]] > bound).any()):
            raise refusal(causal, "its logits are made in a way that is not known")
        if bool((difference > bound).any()):
            raise refusal(causal, "a document changes the one after it")


@torch.no_grad()
def probe_shared(causal: Any, head: Head) -> None:
    """Compare what the model gives for documents that share their begin with what it gives for each alone.

    Raises:
        ModelError: it is not the same.
    """
    vocabulary, device = causal.get_input_embeddings().weight.shape[0], causal.device
    ids = torch.arange(9).flip(0).int().numpy() % vocabulary
    parts = [Document(part, part >= 0) for part in (ids[:6], ids[[0, 1, 2, 6, 7, 8, 6]])]
    found: list[Tensor] = []
    expected: list[Tensor] = []
    together, apart = [Group.of(parts)], [Group.of([part]) for part in parts]
    for made, kept in ((join_groups(together), found), (join_groups(apart), expected)):
        data = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in made.items()}
        hidden = decode(causal, data).last_hidden_state[0]
        kept.append(head.logits(hidden[data["places"]]))
    bound = float(expected[0].abs().max()) * (1e-3 if causal.dtype == torch.float32 else 0.2)
    if bool(((found[0] - expected[0]).abs() > bound).any()):
        raise refusal(causal, "documents that share a prompt are not as each alone")


def check_layers(causal: Any) -> None:
    """Refuse a model with layers that can't keep documents apart, by their kinds."""
    kinds = set(getattr(causal.config.get_text_config(), "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        raise refusal(causal, f"it has layers of the kind {', '.join(unknown)}")


def check_windows(causal: Any, windows: list[int | None], max_length: int) -> None:
    """Refuse a model whose layers did not come to our attention, or not with their sliding windows."""
    if not windows:
        raise refusal(causal, "it has an attention of its own")
    config = causal.config.get_text_config()
    window = getattr(config, "sliding_window", None) or max_length
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) and not any(windows) and window < max_length:
        raise ModelError(
            "the model's layers don't say their sliding window",
            where="data.max_length",
            given=max_length,
            expected=f"at most {window}",
        )


def refusal(causal: Any, problem: str) -> ModelError:
    """The error of a model that can't be trained here."""
    return ModelError(
        f"the model can't be trained on documents in one row: {problem}",
        where="model.path",
        given=type(causal).__name__,
        do="report it: training would use a wrong loss",
    )
