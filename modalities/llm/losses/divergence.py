"""Divergences of a student's next-token distributions from a teacher's."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def divergence(student: Tensor, teacher: Tensor, mixture: float = 0.0, temperature: float = 1.0) -> Tensor:
    """[N] generalised Jensen-Shannon divergence of tokens' distributions, in nats (Agarwal et al., GKD,
    arXiv:2306.13649, eq. 1): with p = softmax(teacher / t), q = softmax(student / t), b = mixture and
    m = b p + (1 - b) q, it is b KL(p || m) + (1 - b) KL(q || m). At the ends it is KL(p || q) for b = 0, the forward
    KL, and KL(q || p) for b = 1, the reverse KL; b = 0.5 is Jensen-Shannon. Not multiplied by t^2.

    Where the vocabularies are padded to different sizes, only the ids that both have count.

    Args:
        student: [N, V] logits.
        teacher: [N, V'] logits, without gradient.
        mixture: b.
        temperature: t.
    """
    known = min(student.shape[1], teacher.shape[1])
    q = (student[:, :known].float() / temperature).log_softmax(dim=1)
    p = (teacher[:, :known].float() / temperature).log_softmax(dim=1)
    if mixture == 0:
        return _kl(p, q)
    if mixture == 1:
        return _kl(q, p)
    m = torch.logaddexp(p + math.log(mixture), q + math.log1p(-mixture))
    return mixture * _kl(p, m) + (1 - mixture) * _kl(q, m)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """[N] KL of log-probabilities [N, V]."""
    return (first.exp() * (first - second)).sum(dim=1)
