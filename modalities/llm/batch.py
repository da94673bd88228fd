"""Batches without padding: the documents of a batch stand one after the other in a row, and none sees another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .tokens import IGNORED, Document


def join(documents: Sequence[Document]) -> dict[str, Any]:
    """The tensors of a batch.

    Args:
        documents: S of them, N tokens in all.

    Returns:
        `input_ids` [N] int64; `position_ids` [N] int64, from 0 in each document; `bounds` [S + 1] int32, where each
        begins, and N; `longest`: tokens of the longest; `targets` [N] int64: the token that follows in the same
        document if it carries loss, else -100. A document's first token is thus never predicted from the one before.
    """
    sizes = np.array([len(document) for document in documents])
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    ids = np.concatenate([document.ids for document in documents]).astype(np.int64)
    trained = np.concatenate([document.trained for document in documents])
    trained[bounds[:-1]] = False
    targets = np.full(len(ids), IGNORED, dtype=np.int64)
    targets[:-1] = np.where(trained, ids, IGNORED)[1:]
    return {
        "input_ids": torch.from_numpy(ids),
        "position_ids": torch.from_numpy(np.arange(len(ids)) - np.repeat(bounds[:-1], sizes)),
        "targets": torch.from_numpy(targets),
        "bounds": torch.from_numpy(bounds.astype(np.int32)),
        "longest": int(sizes.max()),
    }
