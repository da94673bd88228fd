"""Divergences of a student's next-token distributions from a teacher's."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    return _generalised(_log_softmax(student, known, temperature), _log_softmax(teacher, known, temperature), mixture)


@dataclass(frozen=True)
class Top:
    """Distributions of N tokens by their most probable ids.

    Args:
        ids: [N, k] int64, the most probable first.
        log_probs: [N, k] of these, in nats.
        rest: [N] log of the probability of all other ids together; None: there are no others.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor | None


def top(logits: Tensor, k: int, known: int, temperature: float = 1.0) -> Top:
    """The k most probable of the first `known` ids, whose distribution is softmax(logits / temperature) over these.

    Args:
        logits: [N, V], V at least `known`.
        k: all ids, if there are no more.
        known: ids that count; further rows of a table are padding.
        temperature: divides the logits.
    """
    whole = _log_softmax(logits, known, temperature)
    found = whole.topk(min(k, known), dim=1)
    return Top(found.indices, found.values, _others(whole, found.indices) if k < known else None)


def top_divergence(student: Tensor, teacher: Top, known: int, mixture: float = 0.0, temperature: float = 1.0) -> Tensor:
    """[N] the divergence of `divergence` over k + 1 outcomes: the teacher's k most probable ids, and "any other id",
    whose probability is what is left of 1 in p and in q alike. Putting outcomes together never makes a divergence
    larger, so it is a lower bound of the full one; with k = V it is the full one.

    Args:
        student: [N, V] logits.
        teacher: of `top`, with the same `known` and `temperature`.
        known: ids that count.
        mixture: b.
        temperature: t.
    """
    whole = _log_softmax(student, known, temperature)
    q, p = whole.gather(1, teacher.ids), teacher.log_probs
    if teacher.rest is not None:
        q = torch.cat([q, _others(whole, teacher.ids)[:, None]], dim=1)
        p = torch.cat([p, teacher.rest[:, None]], dim=1)
    return _generalised(q, p, mixture)


def _log_softmax(logits: Tensor, known: int, temperature: float) -> Tensor:
    return (logits[:, :known].float() / temperature).log_softmax(dim=1)


def _others(log_probs: Tensor, ids: Tensor) -> Tensor:
    """[N] log of the probability of all ids [N, V] but those [N, k]; summed, as 1 minus the others loses its digits."""
    return log_probs.scatter(1, ids, float("-inf")).logsumexp(dim=1)


def _generalised(q: Tensor, p: Tensor, mixture: float) -> Tensor:
    if mixture == 0:
        return _kl(p, q)
    if mixture == 1:
        return _kl(q, p)
    m = torch.logaddexp(p + math.log(mixture), q + math.log1p(-mixture))
    return mixture * _kl(p, m) + (1 - mixture) * _kl(q, m)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """[N] KL of log-probabilities [N, V]."""
    return (first.exp() * (first - second)).sum(dim=1)
