"""From a reranker's logits to its loss, by the section that names it in the recipe."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import sections
from ..errors import unsuitable
from ..losses import distill, listwise
from ..losses.summed import Summed
from ..objectives import Facts


def objective(section: Any, logits: Tensor, facts: Facts) -> Summed:
    """Loss of logits [M, C] of M documents, C labels each.

    Raises:
        DataError: the rows don't give what the loss needs.
    """
    if isinstance(section, sections.ClassLoss):
        if bool((facts.labels >= logits.shape[1]).any()) or bool((facts.labels != facts.labels.round()).any()):
            raise unsuitable(section.name, f"classes from 0 to {logits.shape[1] - 1}")
        return listwise.cross_entropy(logits, facts.labels.long())
    index, mask = facts.lists()
    listed, labels = logits[:, 0][index], facts.labels[index]
    if isinstance(section, sections.PairMarginLoss):
        if facts.teacher is None:
            raise unsuitable(section.name, "a teacher's scores of each document (`scores`)")
        return distill.margin_mse(listed, facts.teacher[index], mask)
    if isinstance(section, sections.PointwiseLoss):
        if bool(((labels < 0) | (labels > 1)).any()):
            raise unsuitable(section.name, "labels from 0 to 1")
        return listwise.bce(listed, labels, mask, section.positive_weight)
    if isinstance(section, sections.SquaredLoss):
        return listwise.mse(listed, labels if facts.teacher is None else facts.teacher[index], mask)
    if isinstance(section, sections.LambdaLoss):
        return listwise.lambda_loss(listed, labels, mask, section.weighing, section.k, section.sigma)
    if isinstance(section, sections.ListNetLoss):
        return listwise.list_net(listed, labels, mask)
    if isinstance(section, sections.ListMLELoss):
        return listwise.list_mle(listed, labels, mask, section.position_aware)
    if isinstance(section, sections.RankNetLoss):
        return listwise.rank_net(listed, labels, mask, sigma=section.sigma)
    assert isinstance(section, sections.GroupSoftmaxLoss)
    return listwise.group_softmax(listed, labels, mask, section.temperature)
