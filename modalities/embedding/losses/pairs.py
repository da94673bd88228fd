"""Losses of pairs and triplets of embeddings."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .summed import Summed, each, wide

Distance = Literal["cosine", "euclidean", "manhattan"]


def cosines(left: Tensor, right: Tensor) -> Tensor:
    """Cosine similarity of left [B, D] and right [B, D], row by row: [B]."""
    return (functional.normalize(wide(left), dim=-1) * functional.normalize(wide(right), dim=-1)).sum(dim=-1)


def angles(left: Tensor, right: Tensor) -> Tensor:
    """The similarity of AnglE (Li & Li, ACL 2024, arXiv:2309.12871), |cos + sin|, of left [B, D] and right [B, D]: [B].

    Read the first half of an embedding as real and the second as imaginary parts: z and w, of unit length. The real
    part of sum(z conj(w)) is their cosine, its imaginary part the sine term; the authors' code takes the absolute value
    of their sum. An odd last dimension is paired with 0.
    """
    if left.shape[-1] % 2:
        left, right = functional.pad(left, (0, 1)), functional.pad(right, (0, 1))
    left, right = functional.normalize(wide(left), dim=-1), functional.normalize(wide(right), dim=-1)
    (real, imaginary), (real_other, imaginary_other) = left.chunk(2, dim=-1), right.chunk(2, dim=-1)
    sines = (imaginary * real_other - real * imaginary_other).sum(dim=-1)
    return ((left * right).sum(dim=-1) + sines).abs()


def cosent(similarity: Tensor, labels: Tensor, scale: float = 20.0) -> Summed:
    """CoSENT (Huang et al., TASLP 2024, doi 10.1109/TASLP.2024.3402087): similarities in the order of their labels.

        log(1 + sum over pairs i, j with label_i > label_j of exp(scale x (s_j - s_i)))

    It is one number of the whole batch, so a batch of B counts as B of it. With `angles` it is the loss of AnglE.

    Args:
        similarity: [B] of each pair of texts.
        labels: [B] what should order them; equal labels ask for nothing.
        scale: what similarities are multiplied by.

    Returns:
        One value, B times the batch's, with count B.
    """
    scaled = wide(similarity) * scale
    wrong = (scaled[None, :] - scaled[:, None])[labels[:, None] > labels[None, :]]  # s_j - s_i
    loss = torch.cat([wrong.new_zeros(1), wrong]).logsumexp(dim=0, keepdim=True)
    return Summed(loss * len(labels), torch.full_like(loss, len(labels), requires_grad=False))


def cosine_mse(left: Tensor, right: Tensor, labels: Tensor) -> Summed:
    """Squared difference of cosine similarity and label (SBERT, Reimers & Gurevych, arXiv:1908.10084).

    Args:
        left: [B, D]
        right: [B, D]
        labels: [B] in [-1, 1].
    """
    return each((cosines(left, right) - labels).square())


def distances(left: Tensor, right: Tensor, kind: Distance) -> Tensor:
    """Distance of left [B, D] and right [B, D], row by row: [B]; cosine distance is 1 - cosine similarity."""
    if kind == "cosine":
        return 1 - cosines(left, right)
    length: Tensor = torch.linalg.vector_norm(wide(left) - wide(right), ord=2 if kind == "euclidean" else 1, dim=-1)
    return length


def margin_contrastive(
    left: Tensor, right: Tensor, labels: Tensor, margin: float = 0.5, distance: Distance = "cosine"
) -> Summed:
    """Contrastive loss of pairs (Hadsell, Chopra & LeCun, CVPR 2006): (y d^2 + (1 - y) max(margin - d, 0)^2) / 2.

    Args:
        left: [B, D]
        right: [B, D]
        labels: [B] y, 1: the same, 0: different.
        margin: distance that different ones should have at least.
        distance: how d is measured.
    """
    apart = distances(left, right, distance)
    labels = labels.to(apart.dtype)
    return each(0.5 * (labels * apart.square() + (1 - labels) * functional.relu(margin - apart).square()))


def triplet(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 5.0, distance: Distance = "euclidean"
) -> Summed:
    """Triplet loss (Schroff et al., arXiv:1503.03832): max(d(anchor, positive) - d(anchor, negative) + margin, 0).

    Args:
        anchor: [B, D]
        positive: [B, D]
        negative: [B, D]
        margin: in units of the distance.
        distance: how d is measured.
    """
    nearer = distances(anchor, positive, distance) - distances(anchor, negative, distance)
    return each(functional.relu(nearer + margin))


class SoftmaxHead(nn.Module):
    """Classifier of a pair of embeddings u, v from (u, v, |u - v|), and u * v if asked (SBERT, arXiv:1908.10084).

    Its weights are trained, so they belong to the optimizer and in the checkpoint.

    Args:
        width: D of the embeddings.
        classes: number of classes C.
        product: also u * v.
    """

    def __init__(self, width: int, classes: int, product: bool = False):
        super().__init__()
        self.product = product
        self.classifier = nn.Linear((4 if product else 3) * width, classes)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Logits [B, C] of left [B, D] and right [B, D]."""
        parts = [left, right, (left - right).abs()] + ([left * right] if self.product else [])
        logits: Tensor = self.classifier(torch.cat(parts, dim=-1).to(self.classifier.weight.dtype))
        return logits

    def loss(self, left: Tensor, right: Tensor, labels: Tensor) -> Summed:
        """Cross-entropy of the classes `labels` [B] int64, in nats."""
        return each(functional.cross_entropy(wide(self(left, right)), labels, reduction="none"))
