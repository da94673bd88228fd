"""Keys and values of completions that are being drawn, with room for tokens to come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

ROOM = 64
"""Tokens that room is made for at a time."""


class Roomy(DynamicLayer):
    """A layer's keys and values as transformers keeps them, but that all of them are not copied for each new token."""

    _rooms: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        begin, added = self.keys.shape[2], key_states.shape[2]
        rooms = self._rooms
        if rooms is None or rooms[0].shape[2] < begin + added:
            rooms = self._rooms = _room(self.keys, added), _room(self.values, added)
        for room, new in zip(rooms, (key_states, value_states), strict=True):
            room[:, :, begin : begin + added] = new
        self.keys, self.values = (room[:, :, : begin + added] for room in rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rooms = None


def with_room(cache: Any) -> None:
    """Give the layers of a cache that hold some tokens already room for more; those with a window stay as they are."""
    cache.layers = [_roomy(one) if type(one) is DynamicLayer and one.is_initialized else one for one in cache.layers]


def _roomy(layer: DynamicLayer) -> Roomy:
    found = Roomy()  # type: ignore[no-untyped-call]
    found.__dict__.update(layer.__dict__)
    return found


def _room(held: Tensor, added: int) -> Tensor:
    """[B, H, T + added + ROOM, D] with what is held [B, H, T, D] at its begin."""
    batch, heads, tokens, width = held.shape
    found = torch.empty(batch, heads, tokens + added + ROOM, width, dtype=held.dtype, device=held.device)
    found[:, :, :tokens] = held
    return found
