"""The loss of an evaluation set, over a fixed pool of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .. import sections
from ..objectives import Facts
from .encoded import Encoded, stacked

if TYPE_CHECKING:
    from ..retriever import RetrieverTask

BLOCK = 256
"""Queries of which the loss is computed at once, whatever the batch size of the evaluation."""


def pool_loss(task: RetrieverTask, records: Sequence[Encoded]) -> float | None:
    """The loss of the first data set over the set: 256 queries at a time, in its order, each against all documents of
    the set where the loss has in-batch negatives. It depends on no batch size."""
    section = task.losses[0]
    rows = [one for one in records if one.query is not None and one.documents and one.shape in SHAPES[section.name]]
    if not rows or isinstance(section, sections.SoftmaxLoss) or getattr(section, "guide", None):
        return None  # of a classifier or a guide that is not part of the model
    if section.name in TAUGHT and not all(one.teacher for one in rows):
        return None
    total = count = 0.0
    pool = _documents(rows)
    for begin in range(0, len(rows), BLOCK):
        block = rows[begin : begin + BLOCK]
        vectors, facts = pool if isinstance(section, sections.ContrastiveLoss) else _documents(block)
        first = sum(len(one.documents) for one in rows[:begin]) if vectors is pool[0] else 0
        facts = _seen(facts, block, first)
        found = task.objective(section, stacked([one.query for one in block]), vectors, facts, {"source": 0})
        total, count = total + float(found.total), count + float(found.count)
    return total / count if count else None


TAUGHT = ("margin_mse", "kl")
SHAPES = {
    **dict.fromkeys(("contrastive", "triplet", "margin_mse", "kl"), ("groups",)),
    **dict.fromkeys(("cosent", "angle", "cosine"), ("scored",)),
    **dict.fromkeys(("margin_contrastive", "softmax"), ("classes", "scored", "groups")),
}
"""Rows that a loss can be computed of."""


def _documents(rows: Sequence[Encoded]) -> tuple[Tensor, Facts]:
    """All documents of some examples, and what is known of them."""
    owner = [at for at, one in enumerate(rows) for _ in one.documents]
    labels = [float(max(one.label, 0)) if one.shape == "classes" else label for one in rows for label in one.labels]
    teacher = [value for one in rows for value in one.teacher]
    zeros = torch.zeros(len(owner), dtype=torch.int64)
    facts = Facts(
        torch.tensor(owner),
        torch.tensor(labels),
        torch.tensor([key for one in rows for key in one.document_keys]),
        zeros,
        torch.zeros(len(rows), 0, dtype=torch.int64),
        0,
        torch.tensor(teacher) if len(teacher) == len(owner) else None,
    )
    return stacked([vector for one in rows for vector in one.documents]), facts


def _seen(facts: Facts, block: Sequence[Encoded], first: int) -> Facts:
    """The facts as a block of queries sees them, whose first document is number `first`."""
    number = sum(len(one.documents) for one in block)
    owner = torch.full_like(facts.owner, -1)
    owner[first : first + number] = facts.owner[first : first + number] - int(facts.owner[first])
    known = pad_sequence([torch.tensor(one.known, dtype=torch.int64) for one in block], True, padding_value=-1)
    return replace(facts, owner=owner, known=known)
