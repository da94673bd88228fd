"""Errors that several parts of the modality have."""

from __future__ import annotations

from ...common.errors import DataError


def unsuitable(loss: str, needs: str) -> DataError:
    """The error for data that a loss can't be computed of."""
    return DataError(f"the loss {loss} can't be computed of these rows", where="data.train", expected=needs)
