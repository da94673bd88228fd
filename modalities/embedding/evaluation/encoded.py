"""Examples with the vectors of their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Encoded:
    """An example with the vectors of its texts.

    Args:
        query: [...] vector; None: documents that belong to no query.
        documents: vector of each.
        labels: of each document.
        teacher: scores of each document, or none.
        query_key: text id.
        document_keys: text ids.
        known: keys of all documents that are relevant to the query.
        label: class of the text or pair, -1 without one.
        shape: what the labels are.
        source: data set.
        fields: what it may be sliced by.
        texts: tokens of the query, if there is one, and of each document.
        where: place of the row.
    """

    query: np.ndarray | None
    documents: Sequence[np.ndarray]
    labels: tuple[float, ...]
    teacher: tuple[float, ...]
    query_key: int
    document_keys: tuple[int, ...]
    known: tuple[int, ...]
    label: int
    shape: str
    source: int
    fields: Mapping[str, Any]
    texts: tuple[np.ndarray, ...]
    where: str = ""


def encoded(data: dict[str, Any], vectors: np.ndarray) -> list[Encoded]:
    """The examples of a batch with their vectors [U, ...]."""
    lengths = data["attention_mask"].sum(dim=1).tolist()
    ids = data["input_ids"].int().cpu().numpy()
    queries, documents, owner = data["queries"].tolist(), data["documents"].tolist(), data["owner"].tolist()
    labels, keys = data["labels"].tolist(), data["document_keys"].tolist()
    teacher = None if data["scores"] is None else data["scores"].tolist()
    known = [tuple(key for key in row if key >= 0) for row in data["known"].tolist()]
    own: dict[int, list[int]] = defaultdict(list)
    for at, query in enumerate(owner):
        own[query].append(at)
    found = []
    for row, query in enumerate(queries):
        places = own[row]
        texts = [query] * (query >= 0) + [documents[at] for at in places]
        found.append(
            Encoded(
                vectors[query] if query >= 0 else None,
                [vectors[documents[at]] for at in places],
                tuple(labels[at] for at in places),
                () if teacher is None else tuple(teacher[at] for at in places),
                int(data["query_keys"][row]),
                tuple(keys[at] for at in places),
                known[row],
                int(data["classes"][row]),
                data["shape"],
                data["source"],
                data["fields"][row],
                tuple(ids[text][: lengths[text]] for text in texts),
                data["where"][row],
            )
        )
    return found


def stacked(vectors: Sequence[np.ndarray | None]) -> Tensor:
    """[N, ...]; those of tokens are filled up with zeros to the longest."""
    tensors = [torch.from_numpy(np.asarray(vector)) for vector in vectors]
    return torch.stack(tensors) if tensors[0].dim() == 1 else pad_sequence(tensors, batch_first=True)
