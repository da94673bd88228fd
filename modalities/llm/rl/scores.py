"""Log-probabilities and entropies of tokens at a temperature, from last hidden states, without all logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ....common.losses import TokenLoss, chunk_rows, log_probs, logits_of
from ..model import Head


def scores(
    head: Head, hidden: Tensor, labels: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """([N] log-probability of each label, [N] entropy of the distribution that it is from), in nats, of softmax(z / t).

    Args:
        head: the output layer.
        hidden: [N, D] last hidden states.
        labels: [N] the tokens that followed.
        temperature: t.
        with_entropy: whether the entropy has a gradient.
    """
    weight = head.weight()
    if weight is None:
        rows = chunk_rows(head.module.weight)
        parts = [
            checkpoint(_chunk, head, hidden[at : at + rows], labels[at : at + rows], temperature, use_reentrant=False)
            for at in range(0, max(1, len(hidden)), rows)
        ]
        found, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        return found, entropy if with_entropy else entropy.detach()
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(lower), weight.to(lower)
    with torch.autocast(device, enabled=False):
        result: tuple[Tensor, Tensor] = _Scores.apply(hidden, weight, labels, head.kind, temperature, with_entropy)
    return result


def _chunk(head: Head, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden) / temperature
    return log_probs(logits, labels), logits.logsumexp(dim=1) - (logits.softmax(dim=1) * logits).sum(dim=1)


class _Scores(torch.autograd.Function):
    """With p = softmax(z / t): d log p_y / dz = (1_y - p) / t, and dH / dz = -p (log p + H) / t.

    Where all rows are one chunk, their probabilities are kept for the backward pass. Else, with a frozen output layer
    and without the entropy's gradient, a row of D is kept for each; or logits are computed once more.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, kind: TokenLoss, temperature: float, entropic: bool
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        rows = chunk_rows(weight)
        is_one = 0 < len(hidden) <= rows and (needs_hidden or needs_weight)
        is_kept = needs_hidden and not needs_weight and not entropic and not is_one
        wide = torch.promote_types(hidden.dtype, torch.float32)
        found, entropy = (torch.empty(len(hidden), device=hidden.device, dtype=wide) for _ in range(2))
        by_hidden = torch.empty_like(hidden) if is_kept else None
        made: tuple[Tensor, Tensor | None] | None = None
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            logits = logits_of(hidden[part], weight, kind)
            made = logits, _slope(logits, kind) if is_one or is_kept else None
            found[part], entropy[part] = _to_probabilities(logits, labels[part], temperature)
            if by_hidden is not None:
                ones = torch.full_like(found[part], kind.scale / temperature)
                torch.mm(_by_logits(*made, labels[part], ones).to(hidden.dtype), weight, out=by_hidden[part])
        ctx.by_hidden, ctx.kind, ctx.temperature, ctx.entropic = by_hidden, kind, temperature, entropic
        ctx.made = made if is_one else None
        ctx.save_for_backward(*(() if is_kept else (hidden, weight, labels, entropy)))
        if not entropic:
            ctx.mark_non_differentiable(entropy)
        return found, entropy

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if ctx.by_hidden is not None:
            return ctx.by_hidden * outputs[0][:, None].to(ctx.by_hidden.dtype), None, None, None, None, None
        hidden, weight, labels, entropy = ctx.saved_tensors
        by_log_prob, by_entropy = (one * (ctx.kind.scale / ctx.temperature) for one in outputs)
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        rows = chunk_rows(weight)
        made, ctx.made = ctx.made, None  # what is made of the probabilities is written over them
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            if made is None or at:
                logits = logits_of(hidden[part], weight, ctx.kind)
                made = logits, _slope(logits, ctx.kind)
                _to_probabilities(logits, labels[part], ctx.temperature)
            own, by_own = (entropy[part], by_entropy[part]) if ctx.entropic else (None, None)
            exp, slope = made
            by_logits = _by_logits(exp, slope, labels[part], by_log_prob[part], own, by_own).to(hidden.dtype)
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight.addmm_(by_logits.T, hidden[part])
        return by_hidden, by_weight, None, None, None, None


def _to_probabilities(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """([N] log-probability of each label, [N] entropy) of logits [N, V] / t, which become probabilities. A few rows at
    a time, as all that is done to them then stays in a CPU's cache."""
    rows = max(1, 2**20 // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    log_probs, entropies = [logits.new_empty(0)], [logits.new_empty(0)]
    for part, wanted in zip(logits.split(rows), labels.split(rows), strict=True):
        if temperature != 1.0:
            part.div_(temperature)
        log_total = part.logsumexp(dim=1)
        log_probs.append(part.gather(1, wanted[:, None])[:, 0] - log_total)
        exp = (part - log_total[:, None]).exp_()
        entropies.append(log_total - torch.linalg.vecdot(exp, part))
        part.copy_(exp)
    return torch.cat(log_probs), torch.cat(entropies)


def _by_logits(
    exp: Tensor,
    slope: Tensor | None,
    labels: Tensor,
    by_log_prob: Tensor,
    entropy: Tensor | None = None,
    by_entropy: Tensor | None = None,
) -> Tensor:
    """[N, V] derivative by logits before their cap, written over the probabilities.

    Args:
        exp: [N, V] probabilities.
        slope: [N, V] derivative of the cap.
        labels: [N].
        by_log_prob: [N] derivative by the log-probability of each label, times scale / t.
        entropy: [N], if that has a gradient.
        by_entropy: [N] derivative by it, times scale / t.
    """
    bent: Tensor | None = None
    if entropy is not None and by_entropy is not None:
        bent = (torch.special.xlogy(exp, exp) + exp * entropy[:, None]).mul_(by_entropy[:, None])
    found = exp.mul_(-by_log_prob[:, None]).scatter_add_(1, labels[:, None], by_log_prob[:, None].to(exp.dtype))
    if bent is not None:
        found.sub_(bent)
    return found if slope is None else found.mul_(slope)


def _slope(logits: Tensor, kind: TokenLoss) -> Tensor | None:
    """[N, V] derivative of capped logits by those that are not; None: they are not capped."""
    return None if kind.softcap is None else 1 - (logits / kind.softcap).square()
