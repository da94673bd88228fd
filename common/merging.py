"""A model without its adapter: the adapter's update is part of the weights.

Where one matrix is both the token table and the output layer and an adapter changes only one of the two, the matrix is
parted first: merged in place, the update of one would also change the other (PEFT warns of it and goes on).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import ExportError


def merged(model: Any) -> Any:
    """The transformers model with PEFT's adapters merged into its weights, in place; without any, the model itself.

    Raises:
        ExportError: the base is quantised, so that a merge would round the sum to 4 bits again.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return model
    if getattr(model.get_base_model(), "is_quantized", False):
        raise ExportError(
            "the base is quantised, so that merged weights would be rounded again",
            where="model.quantization",
            do="export the adapter: --to adapter",
        )
    inner = model.get_base_model()
    if _is_tied(inner) and _parts(inner):
        _part(inner)
    plain = model.merge_and_unload()
    _settle(plain)
    return plain


def _ends(inner: Any) -> tuple[Any, Any]:
    """The (token table, output layer), with what PEFT has put around them; None where a model has no such thing."""
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return (inner.get_input_embeddings(), head) if head is not None else (None, None)


def _base(module: Any) -> Any:
    """The layer inside what PEFT has put around it, of which each part may be wrapped."""
    for name in ("original_module", "base_layer"):
        module = getattr(module, name, module)
    return module


def _is_tied(inner: Any) -> bool:
    table, head = _ends(inner)
    return head is not None and _base(table).weight is _base(head).weight


def _parts(inner: Any) -> bool:
    """Whether an adapter changes one end in another way than the other. Trained rows are shared by both."""
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    changes = [
        isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) and not isinstance(end, TrainableTokensLayer)
        for end in _ends(inner)
    ]
    return any(changes)


def _part(inner: Any) -> None:
    """Give the output layer a matrix of its own."""
    head = _base(inner.get_output_embeddings())
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    _say_untied(inner)


def _say_untied(inner: Any) -> None:
    inner.config.tie_word_embeddings = False
    inner.config.get_text_config().tie_word_embeddings = False
    inner._tied_weights_keys = None
    inner.all_tied_weights_keys = {}


def _settle(plain: Any) -> None:
    """After a merge: what is tied is one tensor, what differs is said to be untied."""
    table, head = _ends(plain)
    if head is None or table.weight is head.weight or not plain.config.get_text_config().tie_word_embeddings:
        return
    if table.weight.shape == head.weight.shape and torch.equal(table.weight, head.weight):
        head.weight = table.weight
    else:
        _say_untied(plain)
