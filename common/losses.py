"""Losses that several modalities share, summed and not averaged: the task divides by what an optimizer step holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = {"cpu": 2**24, "cuda": 2**27}
"""Logits that are in memory at once, by kind of device."""


@dataclass(frozen=True)
class TokenLoss:
    """What is asked of each token's distribution p, whose logits are z = cap(scale * hidden @ weight.T + bias).

    Args:
        smoothing: mass e spread evenly: the target is (1 - e) one-hot + e / V (Szegedy et al., arXiv:1512.00567).
        z_weight: weight of log^2(sum exp z), which keeps logits from drifting (Chowdhery et al., PaLM,
            arXiv:2204.02311).
        dynamic: weigh each token by its own probability, without gradient (Wu et al., DFT, arXiv:2508.05629).
        scale: factor of the logits (Cohere, Granite).
        softcap: c in z = c tanh(z / c) (Gemma 2, arXiv:2408.00118); None: not capped.
    """

    smoothing: float = 0.0
    z_weight: float = 0.0
    dynamic: bool = False
    scale: float = 1.0
    softcap: float | None = None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, kind: TokenLoss = TokenLoss()) -> Tensor:
    """Summed cross-entropy of the logits `hidden @ weight.T`, which are never in memory all at once.

    With p = softmax(z) and the target q, the gradient of -sum(q log p) with respect to z is p - q, so each chunk's
    gradient is known as soon as its logits are, and is multiplied into those of `hidden` and `weight` there and then
    (as in Hsu et al., Liger Kernel, arXiv:2410.10989). The z-term adds 2 w log(sum exp z) p; capping multiplies by
    1 - (z / c)^2.

    Args:
        hidden: [N, D] last hidden states of the places that carry loss.
        weight: [V, D] output layer.
        labels: [N] token ids.
        kind: variations of the loss and of the logits.

    Returns:
        Scalar, in nats, in float32 at least.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(lower), weight.to(lower)
    with torch.autocast(device, enabled=False):
        total: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, kind)
    return total


def chunk_rows(weight: Tensor) -> int:
    """Rows of logits over this output layer that are computed at once."""
    return max(64, CHUNK.get(weight.device.type, CHUNK["cpu"]) // len(weight))


def logits_of(hidden: Tensor, weight: Tensor, kind: TokenLoss) -> Tensor:
    """[N, V] logits, scaled and capped, in float32 at least."""
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if kind.scale != 1.0:
        logits = logits * kind.scale
    return logits if kind.softcap is None else kind.softcap * torch.tanh(logits / kind.softcap)


def token_loss(logits: Tensor, labels: Tensor, kind: TokenLoss, log_total: Tensor | None = None) -> Tensor:
    """The same loss of logits [N, V] that are in memory; summed, differentiable by autograd.

    Args:
        log_total: [N] their logsumexp, if it is known.
    """
    log_total = logits.logsumexp(dim=1) if log_total is None else log_total
    right = logits.gather(1, labels[:, None])[:, 0]
    losses = (log_total - right) * (1 - kind.smoothing)
    if kind.smoothing:
        losses = losses + (log_total - logits.mean(dim=1)) * kind.smoothing
    if kind.dynamic:
        losses = losses * (right - log_total).detach().exp()
    if kind.z_weight:
        losses = losses + kind.z_weight * log_total.square()
    return losses.sum()


def linear_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, kind: TokenLoss = TokenLoss()) -> Tensor:
    """Log-probability of each label under the logits `hidden @ weight.T`, which are never in memory all at once.

    Where the output layer is frozen, the gradient of each is kept as a row of D from the forward pass; where it is
    trained, logits are computed once more in the backward pass, as what they are to be weighed by is known only then.

    Args:
        hidden: [N, D] last hidden states.
        weight: [V, D] output layer.
        labels: [N] token ids.
        kind: scale and cap of the logits; the rest is not used.

    Returns:
        [N] in nats, in float32 at least.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(lower), weight.to(lower)
    with torch.autocast(device, enabled=False):
        found: Tensor = _LinearLogProbs.apply(hidden, weight, labels, TokenLoss(scale=kind.scale, softcap=kind.softcap))
    return found


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """[N] log-probabilities of labels [N] under logits [N, V] that are in memory."""
    return logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(dim=1)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, kind: TokenLoss) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        found = torch.empty(len(hidden), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        by_hidden = torch.empty_like(hidden) if needs_hidden and not needs_weight else None
        rows = chunk_rows(weight)
        for at in range(0, len(hidden), rows):
            part, wanted = hidden[at : at + rows], labels[at : at + rows]
            logits = logits_of(part, weight, kind)
            log_total = logits.logsumexp(dim=1)
            found[at : at + rows] = logits.gather(1, wanted[:, None])[:, 0] - log_total
            if by_hidden is not None:
                by_logits = _gradient(logits, wanted, kind, log_total[:, None]).to(hidden.dtype)
                torch.mm(by_logits, weight, out=by_hidden[at : at + rows])
        ctx.by_hidden, ctx.kind = by_hidden, kind
        ctx.save_for_backward(*((hidden, weight, labels) if needs_weight else ()))
        return found

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        factors = -outputs[0][:, None]  # what is kept and computed here are gradients of cross-entropies
        if ctx.by_hidden is not None:
            return ctx.by_hidden * factors.to(ctx.by_hidden.dtype), None, None, None
        hidden, weight, labels = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight)
        rows = chunk_rows(weight)
        for at in range(0, len(hidden), rows):
            part, wanted = hidden[at : at + rows], labels[at : at + rows]
            logits = logits_of(part, weight, ctx.kind)
            found = _gradient(logits, wanted, ctx.kind, logits.logsumexp(dim=1)[:, None])
            by_logits = found.mul_(factors[at : at + rows]).to(hidden.dtype)
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[at : at + rows])
            by_weight.addmm_(by_logits.T, part)
        return by_hidden, by_weight, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, kind: TokenLoss) -> Tensor:
        total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        by_hidden = torch.empty_like(hidden) if needs_hidden else None
        rows = chunk_rows(weight)
        by_weight = torch.zeros_like(weight) if needs_weight and not 0 < len(hidden) <= rows else None
        for at in range(0, len(hidden), rows):
            part, wanted = hidden[at : at + rows], labels[at : at + rows]
            logits = logits_of(part, weight, kind)
            log_total = logits.logsumexp(dim=1)
            total += token_loss(logits, wanted, kind, log_total)
            if not (needs_hidden or needs_weight):
                continue
            by_logits = _gradient(logits, wanted, kind, log_total[:, None]).to(hidden.dtype)
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[at : at + rows])
            if by_weight is not None:
                by_weight.addmm_(by_logits.T, part)
            elif needs_weight:
                by_weight = by_logits.T @ part
        ctx.gradients = by_hidden, by_weight
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        factor = outputs[0]
        by_hidden, by_weight = ctx.gradients
        if factor != 1:  # as it is, but for loss scaling and weighted sums of losses
            by_hidden = None if by_hidden is None else by_hidden * factor
            by_weight = None if by_weight is None else by_weight * factor
        return by_hidden, by_weight, None, None


def _gradient(logits: Tensor, labels: Tensor, kind: TokenLoss, log_total: Tensor) -> Tensor:
    """[N, V] derivative of `token_loss` by the product of hidden states and weight; the logits are overwritten."""
    slope = None if kind.softcap is None else kind.scale * (1 - (logits / kind.softcap).square())
    found = logits.sub_(log_total).exp_()  # p
    place = labels[:, None]
    token = found.gather(1, place) if kind.dynamic else None
    extra = 2 * kind.z_weight * log_total * found if kind.z_weight else None
    found.sub_(kind.smoothing / found.shape[1])
    found.scatter_add_(1, place, torch.full_like(place, kind.smoothing - 1, dtype=found.dtype))
    if token is not None:
        found.mul_(token)
    if extra is not None:
        found.add_(extra)
    if slope is not None:
        return found.mul_(slope)
    return found if kind.scale == 1.0 else found.mul_(kind.scale)
