"""Losses that ask for what a teacher says, of scores [Q, L] of each query's documents or of embeddings.

Lists are ragged: `mask` [Q, L] says where there is a document; scores elsewhere may be anything finite.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from .summed import Summed, each, wide


def margin_mse(scores: Tensor, teacher: Tensor, mask: Tensor) -> Summed:
    """Squared error of the margins between the first document, the positive, and each other (Hofstätter et al.,
    arXiv:2010.02666), of bi-encoders' similarities or rerankers' logits alike.

    Args:
        scores: [Q, L] of the student.
        teacher: [Q, L] of the teacher, for the documents themselves, not their differences.
        mask: [Q, L] bool

    Returns:
        The sum of each query, which counts as many as it has negatives.
    """
    kept = mask[:, 1:] & mask[:, :1]
    difference = wide(scores) - wide(teacher.detach())
    errors = (difference[:, :1] - difference[:, 1:]).masked_fill(~kept, 0.0).square()
    return Summed(errors.sum(dim=1), kept.sum(dim=1).to(errors.dtype))


def kl_divergence(
    scores: Tensor,
    teacher: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
) -> Summed:
    """KL(teacher || student) of the distributions over a query's documents (Lin et al., arXiv:2010.11386), times the
    square of the student's temperature, which keeps the size of the gradient (Hinton et al., arXiv:1503.02531).

    Args:
        scores: [Q, L] of the student.
        teacher: [Q, L] of the teacher.
        mask: [Q, L] bool
        temperature: what scores are divided by.
        teacher_temperature: what the teacher's are divided by; default: as the student's.

    Returns:
        In nats; a query with fewer than two documents does not count, since its distribution is always the same.
    """
    lowest = torch.finfo(torch.float32).min / 4  # finite, so that 0 x (a difference of two) is 0
    ours = (wide(scores) / temperature).masked_fill(~mask, lowest).log_softmax(dim=1)
    theirs = (wide(teacher.detach()) / (teacher_temperature or temperature)).masked_fill(~mask, lowest)
    terms = theirs.softmax(dim=1) * (theirs.log_softmax(dim=1) - ours)
    return each(terms.masked_fill(~mask, 0.0).sum(dim=1) * temperature**2, mask.sum(dim=1) > 1)


def embedding_distance(student: Tensor, teacher: Tensor, kind: Literal["mse", "l2", "cosine"] = "mse") -> Summed:
    """Distance of each text's embedding to a teacher's (Reimers & Gurevych, arXiv:2004.09813; arXiv:2301.12005).

    Args:
        student: [N, D]
        teacher: [N, D]
        kind: mean of squared differences over D, Euclidean distance, or 1 - cosine similarity.
    """
    student, teacher = wide(student), wide(teacher.detach())
    if kind == "mse":
        return each((student - teacher).square().mean(dim=-1))
    if kind == "l2":
        return each(torch.linalg.vector_norm(student - teacher, dim=-1))
    return each(1 - functional.cosine_similarity(student, teacher, dim=-1))
