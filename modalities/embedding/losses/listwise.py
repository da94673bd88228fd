"""Losses of rerankers, on the logits of each query's documents.

    logits [Q, L], labels [Q, L], mask [Q, L]: where there is a document

Logits and labels where there is none may be anything finite. Pointwise losses (bce, mse) sum over a query's documents
and count them. Pairwise and listwise ones give each query one number and count it once, however long its list is; they
leave out (count 0) queries with fewer than two documents, the pairwise ones those without two that differ in label.
The margin and the distribution of a teacher are in `distill`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from .contrastive import contrastive
from .summed import Summed, each, wide

Weighing = Literal["none", "ndcg1", "ndcg2", "lambda_rank", "ndcg2++"]


def bce(logits: Tensor, labels: Tensor, mask: Tensor, positive_weight: float = 1.0) -> Summed:
    """Binary cross-entropy of each pair, whose label is a probability; `positive_weight` is that of label 1."""
    logits = wide(logits)
    weight = torch.tensor(positive_weight, device=logits.device, dtype=logits.dtype)
    losses = functional.binary_cross_entropy_with_logits(
        logits, labels.to(logits.dtype), pos_weight=weight, reduction="none"
    )
    return _over_documents(losses, mask)


def mse(logits: Tensor, labels: Tensor, mask: Tensor) -> Summed:
    """Squared difference of each pair's logit and score."""
    return _over_documents((wide(logits) - labels).square(), mask)


def cross_entropy(logits: Tensor, labels: Tensor) -> Summed:
    """Cross-entropy of each pair's class, in nats: logits [N, C], labels [N] int64."""
    return each(functional.cross_entropy(wide(logits), labels, reduction="none"))


def group_softmax(logits: Tensor, labels: Tensor, mask: Tensor, temperature: float = 1.0) -> Summed:
    """The positive of a group among all of it: softmax cross-entropy (BGE's rerankers, arXiv:2309.07597).

    Positives are the documents with a label above 0. With several, the mean over them, each against the negatives only.
    A query without a positive does not count.
    """
    positive = (labels > 0) & mask
    return each(contrastive(wide(logits) / temperature, positive, mask), positive.any(dim=1))


def lambda_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    weighing: Weighing = "ndcg2++",
    k: int | None = None,
    sigma: float = 1.0,
    mu: float = 10.0,
    binary: bool = True,
) -> Summed:
    """LambdaLoss (Wang et al., CIKM 2018): logistic losses of pairs, weighed by what they matter to nDCG.

    With documents in the order of their logits, G_i = (2^label_i - 1) / ideal DCG and D_i = log2(1 + i), a query's loss
    is the mean, over its pairs i, j with label_i > label_j, of -w_ij log sigmoid(sigma (s_i - s_j)), where w_ij is

        none            1
        ndcg1           G_i / D_i  (over all i, j)
        ndcg2           |1/D_|i-j| - 1/D_(|i-j|+1)|  |G_i - G_j|
        lambda_rank     |1/D_i - 1/D_j|  |G_i - G_j|
        ndcg2++         mu ndcg2 + lambda_rank

    It is a mean over the pairs of each query, and queries count alike. (A mean over all pairs of the batch, as
    elsewhere, lets lists of 100 documents count 100 times as much as lists of 10.) The two are equal where all queries
    have the same number of pairs.

    Args:
        labels: grades; those below 0 have no gain.
        k: only pairs with one of the two among the first k count, and DCG is that of the first k.
        sigma: steepness.
        mu: weight of ndcg2 in ndcg2++.
        binary: in bits, as the paper has it; else in nats.
    """
    order = wide(logits).masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True)
    scores = wide(logits).masked_fill(~mask, 0.0).gather(1, order)
    grades = labels.to(scores.dtype).masked_fill(~mask, -torch.inf)
    ideal, grades, real = grades.sort(dim=1, descending=True).values, grades.gather(1, order), mask.gather(1, order)

    pairs = real[:, :, None] & real[:, None, :]
    if weighing != "ndcg1":
        pairs = pairs & (grades[:, :, None] > grades[:, None, :])
    places = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    if k is not None:
        pairs = pairs & ((places[:, None] <= k) | (places[None, :] <= k))
    discounts = torch.log2(1.0 + places).to(scores.dtype)
    gains = torch.exp2(grades.clamp(min=0)) - 1
    best = ((torch.exp2(ideal.clamp(min=0)) - 1) / discounts)[:, :k].sum(dim=1, keepdim=True).clamp(min=1e-10)

    losses = -functional.logsigmoid(sigma * (scores[:, :, None] - scores[:, None, :]))
    losses = losses * _weights(weighing, gains / best, discounts, mu) / (math.log(2) if binary else 1.0)
    count = pairs.sum(dim=(1, 2))
    return each(losses.masked_fill(~pairs, 0.0).sum(dim=(1, 2)) / count.clamp(min=1), count > 0)


def _weights(weighing: Weighing, gains: Tensor, discounts: Tensor, mu: float) -> Tensor:
    """Weights of pairs, broadcasting to [Q, L, L], of gains [Q, L] and discounts [L] in the order of scores."""
    if weighing == "none":
        return torch.ones_like(discounts)
    if weighing == "ndcg1":
        return (gains / discounts)[:, :, None]
    difference = (gains[:, :, None] - gains[:, None, :]).abs()
    rank = (1 / discounts[:, None] - 1 / discounts[None, :]).abs()
    if weighing == "lambda_rank":
        return rank * difference
    places = torch.arange(len(discounts), device=discounts.device)
    apart = (places[:, None] - places[None, :]).abs().to(discounts.dtype)
    near = (1 / torch.log2(1 + apart.clamp(min=1)) - 1 / torch.log2(2 + apart)).abs()  # of i = j no pair is made
    return near * difference if weighing == "ndcg2" else (mu * near + rank) * difference


def rank_net(
    logits: Tensor, labels: Tensor, mask: Tensor, k: int | None = None, sigma: float = 1.0, binary: bool = True
) -> Summed:
    """RankNet (Burges et al., ICML 2005): `lambda_loss` with every pair weighing the same."""
    return lambda_loss(logits, labels, mask, "none", k=k, sigma=sigma, binary=binary)


def list_net(logits: Tensor, labels: Tensor, mask: Tensor) -> Summed:
    """ListNet (Cao et al., ICML 2007): cross-entropy of softmax(logits) against softmax(labels) of a list, in nats."""
    lowest = torch.finfo(torch.float32).min / 4
    found = wide(logits).masked_fill(~mask, lowest).log_softmax(dim=1)
    wanted = labels.to(found.dtype).masked_fill(~mask, lowest).softmax(dim=1)
    return each(-(wanted * found).masked_fill(~mask, 0.0).sum(dim=1), mask.sum(dim=1) > 1)


def list_mle(logits: Tensor, labels: Tensor, mask: Tensor, position_aware: bool = False) -> Summed:
    """ListMLE (Xia et al., ICML 2008): -log probability, under Plackett and Luce's model, of the order of the labels.

        sum over places i of w_i (logsumexp of s_i, ..., s_n  -  s_i),  w_i = 1

    Equal labels keep the order they are given in, so rows that are already in order stay so.

    Args:
        position_aware: w_i in proportion to 2^(n - i) - 1 with sum 1, so that the first places count most (Lan et al.,
            UAI 2014).
    """
    order = labels.to(torch.float64).masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    scores, real = wide(logits).gather(1, order), mask.gather(1, order)
    lowest = torch.finfo(torch.float32).min / 4
    rest = scores.masked_fill(~real, lowest).flip(1).logcumsumexp(dim=1).flip(1)
    losses = (rest - scores).masked_fill(~real, 0.0)
    length = mask.sum(dim=1, keepdim=True)
    if position_aware:
        places = torch.arange(1, logits.shape[1] + 1, device=logits.device, dtype=scores.dtype)
        weights = (torch.exp2(-places) - torch.exp2(-length.to(scores.dtype))).masked_fill(~real, 0.0)  # 2^n left out
        losses = losses * weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return each(losses.sum(dim=1), length[:, 0] > 1)


def _over_documents(losses: Tensor, mask: Tensor) -> Summed:
    return Summed(losses.masked_fill(~mask, 0.0).sum(dim=1), mask.sum(dim=1).to(losses.dtype))
