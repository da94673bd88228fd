"""A model's layers over the real tokens of a padded batch only.

Embeddings, pooling and heads see the padded batch as they were written for it. Between them, before the first layer,
the tokens of all texts are joined into one row, and after the last they are put back; attention keeps the texts apart
(`common.attention`). It was the layers' work on padding that cost.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...common import attention
from ...common.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Row:
    """Where the tokens of a padded batch [B, T] stand in a row of N tokens."""

    places: Tensor  # [N] in B x T
    mask: Tensor  # what the layers take for one
    size: tuple[int, int]


class Unpadded:
    """Hooks on the layers of a transformers model; without effect but within `over`.

    Args:
        model: has its layers in one list of `config.num_hidden_layers` modules, and `common.attention` in them.

    Raises:
        ModelError: it has no such list.
    """

    def __init__(self, model: nn.Module):
        self._row: _Row | None = None
        layers = _layers(model)
        self._names = list(inspect.signature(layers[0].forward).parameters)
        for layer in layers:
            layer.register_forward_pre_hook(self._join, with_kwargs=True)
        layers[-1].register_forward_hook(self._put_back)

    @contextmanager
    def over(self, mask: Tensor) -> Iterator[None]:
        """Within it the model is run on the padded batch whose mask [B, T] this is."""
        lengths = mask.sum(dim=1)
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        places = mask.flatten().nonzero()[:, 0]
        self._row = _Row(places, attention.as_mask(bounds, int(lengths.max())), (mask.shape[0], mask.shape[1]))
        try:
            yield
        finally:
            self._row = None

    def _join(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = self._row
        if row is None:
            return None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        hidden = given[self._names[0]]
        if hidden.shape[:2] == row.size and (row.size[0] > 1 or hidden.shape[1] != len(row.places)):
            hidden = _joined(hidden, row)
        given[self._names[0]] = hidden
        if "attention_mask" in self._names or "attention_mask" in kwargs:
            given["attention_mask"] = row.mask
        for name in ("position_ids", "position_embeddings"):
            if given.get(name) is not None:
                given[name] = _each(given[name], row)
        return (given.pop(self._names[0]),), given

    def _put_back(self, layer: nn.Module, args: Any, output: Any) -> Any:
        row = self._row
        if row is None:
            return None
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        flat = hidden.new_zeros(row.size[0] * row.size[1], hidden.shape[2])
        padded = flat.index_copy(0, row.places, hidden[0]).view(*row.size, -1)
        return (padded, *output[1:]) if isinstance(output, tuple) else padded


def _joined(tensor: Tensor, row: _Row) -> Tensor:
    """[1, N, ...] of [B, T, ...], or of [1, T, ...] that all texts share."""
    if tensor.shape[0] == 1:
        tensor = tensor.expand(row.size[0], *tensor.shape[1:])
    return tensor.flatten(0, 1)[row.places][None]


def _each(value: Any, row: _Row) -> Any:
    if isinstance(value, Tensor):
        return _joined(value, row) if value.shape[1] == row.size[1] else value
    return tuple(_each(part, row) for part in value)


def _layers(model: nn.Module) -> nn.ModuleList:
    number = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr,operator]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    if not lists or any(len({type(layer) for layer in found}) > 1 for found in lists[:1]):
        raise ModelError("its layers were not found", where="model.path", given=type(model).__name__)
    return lists[0]


@torch.no_grad()
def unpadded(model: nn.Module, run: Any) -> Unpadded | None:
    """Hooks for a model if it can do without padding: asked of the model itself, once, on a few tokens.

    Args:
        model: the transformers model inside.
        run: gives a tensor [B, ...] for `input_ids` and `attention_mask` [B, T].

    Returns:
        None where it can't, as its attention or its positions are made in a way that is not known here: its texts are
        then padded.
    """
    mask = (torch.arange(5)[None] < torch.tensor([5, 3, 3])[:, None]).long()
    ids = (torch.arange(15).view(3, 5) % model.get_input_embeddings().weight.shape[0]) * mask  # type: ignore[operator]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        hooks = Unpadded(model)
        expected = run(ids, mask)
        with attention.watched() as windows, hooks.over(mask):
            found = run(ids, mask)
    except (ModelError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        log.info("texts are padded: %s", str(error).splitlines()[0])
        return None
    finally:
        for module, mode in modes.items():
            module.training = mode
    if windows and found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
        return hooks
    log.info("texts are padded: the model's layers do not keep the texts of a row apart")
    return None
