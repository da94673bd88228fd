"""From the embeddings of a step to its loss, by the section that names it in the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import sections
from .errors import unsuitable
from .gather import gathered
from .losses import contrastive as negatives
from .losses import distill, pairs
from .losses.summed import Summed, each

Compare = Callable[[Any, Any], Tensor]
"""Similarities [Q, M] of queries and documents, whatever these are."""


@dataclass(frozen=True)
class Facts:
    """What is known of the Q queries and M documents of a step.

    Args:
        owner: [M] which query brought the document; -1: one of another rank.
        labels: [M] relevance, similarity or class.
        keys: [M] text ids.
        sources: [M] data sets.
        known: [Q, K] text ids of each query's positives, filled up with -1.
        source: data set of the queries.
        teacher: [M] a teacher's scores, if the rows give any.
    """

    owner: Tensor
    labels: Tensor
    keys: Tensor
    sources: Tensor
    known: Tensor
    source: int
    teacher: Tensor | None = None

    @classmethod
    def of(cls, data: dict[str, Any]) -> Facts:
        """The facts of a collated batch."""
        owner = data["owner"]
        return cls(
            owner,
            data["labels"],
            data["document_keys"],
            torch.full_like(owner, data["source"]),
            data["known"],
            data["source"],
            data["scores"],
        )

    def of_all_ranks(self) -> Facts:
        """With the documents of all ranks, in the order of `gathered`."""
        from torch import distributed

        number = torch.full_like(self.owner, distributed.get_rank())
        foreign = gathered(number) != distributed.get_rank()
        owner = gathered(self.owner).masked_fill(foreign, -1)
        return Facts(
            owner, gathered(self.labels), gathered(self.keys), gathered(self.sources), self.known, self.source, None
        )

    @property
    def queries(self) -> int:
        return len(self.known)

    def own(self) -> Tensor:
        """[Q, M] which documents a query brought."""
        places = torch.arange(self.queries, device=self.owner.device)
        return self.owner[None, :] == places[:, None]

    def lists(self) -> tuple[Tensor, Tensor]:
        """(index [Q, L] into the documents, mask [Q, L]): each query's own documents, in their order."""
        order = self.owner.argsort(stable=True)
        counts = torch.bincount(self.owner, minlength=self.queries)
        starts = counts.cumsum(0) - counts
        owner = self.owner[order]
        index = torch.zeros(self.queries, int(counts.max()), dtype=torch.int64, device=owner.device)
        index[owner, torch.arange(len(owner), device=owner.device) - starts[owner]] = order
        mask = torch.arange(index.shape[1], device=owner.device)[None] < counts[:, None]
        return index, mask


def contrastive(
    section: sections.ContrastiveLoss, similarity: Tensor, facts: Facts, guide: Tensor | None = None
) -> Summed:
    """Multiple negatives of each query with a positive; `similarity` and the guide's are [Q, M]."""
    own = facts.own()
    relevant = facts.labels > 0
    positive = own & relevant
    candidate = own & ~relevant
    if section.in_batch_negatives:
        candidate = candidate | (~own & (facts.sources == facts.source)[None])
    candidate = candidate & ~negatives.known_positives(facts.keys, facts.known)
    if section.margin is not None:
        margin, relative = section.margin, section.relative_margin
        candidate = candidate & ~negatives.false_negatives(similarity, positive, margin, relative)
    if guide is not None:
        candidate = candidate & ~negatives.false_negatives(guide, positive)
    scores = similarity / section.temperature
    hard = negatives.hardness_of(similarity, section.hardness) if section.hardness else None
    values = negatives.contrastive(scores, positive, candidate, hard)
    if section.symmetric:
        turned = None if hard is None else hard.T
        back = negatives.contrastive(scores.T, positive.T, candidate.T, turned)  # of each document
        share = positive / positive.sum(dim=1, keepdim=True).clamp(min=1)
        values = (values + share.to(back.dtype) @ back) / 2
    return each(values, positive.any(dim=1))


def of_scores(section: Any, similarity: Tensor, facts: Facts) -> Summed:
    """Losses that see no more than similarities [Q, M] of queries and their own documents."""
    if isinstance(section, sections.CosentLoss):
        return pairs.cosent(_paired(similarity, facts), facts.labels, section.scale)
    if facts.teacher is None:
        raise unsuitable(section.name, "a teacher's scores of each document (`scores`, or `pos_scores`, `neg_scores`)")
    index, mask = facts.lists()
    scores, teacher = similarity.gather(1, index), facts.teacher[index]
    if isinstance(section, sections.MarginMSELoss):
        return distill.margin_mse(scores, teacher, mask)
    assert isinstance(section, sections.KLLoss)
    return distill.kl_divergence(scores, teacher, mask, section.temperature)


def of_embeddings(section: Any, queries: Tensor, documents: Tensor, facts: Facts, head: nn.Module | None) -> Summed:
    """Losses of pairs and triplets of embeddings, queries [Q, D] and documents [M, D]."""
    left = queries[facts.owner]
    if isinstance(section, sections.AngleLoss):
        return pairs.cosent(pairs.angles(left, documents), facts.labels, section.scale)
    if isinstance(section, sections.CosineLoss):
        return pairs.cosine_mse(left, documents, facts.labels)
    if isinstance(section, sections.MarginContrastiveLoss):
        return pairs.margin_contrastive(left, documents, (facts.labels > 0).float(), section.margin)
    if isinstance(section, sections.SoftmaxLoss):
        assert isinstance(head, pairs.SoftmaxHead)
        if bool((facts.labels >= section.classes).any()) or bool((facts.labels != facts.labels.round()).any()):
            raise unsuitable("softmax", f"labels from 0 to {section.classes - 1}")
        return head.loss(left, documents, facts.labels.long())
    assert isinstance(section, sections.TripletLoss)
    index, mask = facts.lists()
    relevant = facts.labels[index] > 0
    first = (relevant & mask).int().argmax(dim=1)
    negative = mask & ~relevant & (relevant & mask).any(dim=1, keepdim=True)
    rows, columns = negative.nonzero(as_tuple=True)
    positive = documents[index[rows, first[rows]]]
    return pairs.triplet(queries[rows], positive, documents[index[rows, columns]], section.margin, section.distance)


def _paired(similarity: Tensor, facts: Facts) -> Tensor:
    """[M] similarity of each document with the query that brought it."""
    return similarity[facts.owner, torch.arange(len(facts.owner), device=similarity.device)]


ON_SCORES = (sections.CosentLoss, sections.MarginMSELoss, sections.KLLoss)


def total(found: Summed) -> tuple[Tensor, float]:
    """(sum, count) as the core wants them."""
    return found.total, float(found.count)
