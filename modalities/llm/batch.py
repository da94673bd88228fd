"""Batches without padding: the documents of a batch stand one after the other in a row, and none sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Group:
    """Documents that begin alike, such as answers to one prompt: what they share stands once.

    Args:
        shared: the tokens with which all begin; may be none.
        rests: what follows in each document, at least one token.
    """

    shared: Document
    rests: tuple[Document, ...]

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Group:
        """The group of documents; they share as much as they can, and one alone nothing."""
        first, most = documents[0], min(map(len, documents)) - 1 if len(documents) > 1 else 0
        for other in documents[1:]:
            same = (first.ids[:most] == other.ids[:most]) & (first.trained[:most] == other.trained[:most])
            most = most if same.all() else int(np.argmin(same))
        return cls(first.part(0, most), tuple(one.part(most, len(one)) for one in documents))

    def __len__(self) -> int:
        return len(self.shared) + sum(map(len, self.rests))

    def document(self, number: int) -> Document:
        """One of the documents, whole."""
        parts = self.shared, self.rests[number]
        return Document(np.concatenate([p.ids for p in parts]), np.concatenate([p.trained for p in parts]))


def join_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """The tensors of a batch of groups: of each, what its documents share, then the rest of each, which sees that and
    itself. The decoder computes what is shared once, and gives each document what it would give it alone.

    Args:
        groups: of A documents in all, N tokens, R of them with loss.

    Returns:
        `input_ids`, `position_ids` [N] int64; `bounds` [S + 1] int32 of the S stretches; `key_bounds` [S + 1] and
        `key_places` int32, what each stretch sees (`attention.Keys`); `longest`: tokens of the longest document;
        `places`, `labels` [R] int64: where the hidden state is that predicts a token with loss, and that token, for one
        document after the other; `counts` [A] int64: how many there are of each; `last` [A] int64: places of the
        documents' last tokens.
    """
    ids, positions, bounds, keys = [], [], [0], []
    places, labels, counts, last = [], [], [], []
    for group in groups:
        begin, shared = bounds[-1], len(group.shared)
        before = np.arange(begin, begin + shared)
        if shared:
            ids.append(group.shared.ids)
            positions.append(np.arange(shared))
            keys.append(before)
            bounds.append(begin + shared)
        for number, rest in enumerate(group.rests):
            own = np.arange(bounds[-1], bounds[-1] + len(rest))
            ids.append(rest.ids)
            positions.append(np.arange(shared, shared + len(rest)))
            keys.append(np.concatenate([before, own]))
            bounds.append(bounds[-1] + len(rest))
            whole = group.document(number)
            places.append(keys[-1][:-1][whole.trained[1:]])
            labels.append(whole.ids[1:][whole.trained[1:]])
            counts.append(len(labels[-1]))
            last.append(bounds[-1] - 1)
    sizes = [len(seen) for seen in keys]
    return {
        "input_ids": torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        "position_ids": torch.from_numpy(np.concatenate(positions)),
        "bounds": torch.tensor(bounds, dtype=torch.int32),
        "key_bounds": torch.from_numpy(np.cumsum([0, *sizes]).astype(np.int32)),
        "key_places": torch.from_numpy(np.concatenate(keys).astype(np.int32)),
        "longest": max(sizes),
        "places": torch.from_numpy(np.concatenate(places)),
        "labels": torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        "counts": torch.tensor(counts),
        "last": torch.tensor(last),
    }
