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
        logs: Tensor | None = None
        slope: Tensor | None = None
        for at in range(0, len(hidden), rows):
            wanted = labels[at : at + rows, None]
            logits = logits_of(hidden[at : at + rows], weight, kind)
            if is_one or is_kept:
                slope = _slope(logits, kind)
            logs = _log_softmax(logits, temperature)
            found[at : at + rows] = logs.gather(1, wanted)[:, 0]
            exp = logs.exp()
            entropy[at : at + rows] = -torch.linalg.vecdot(exp, logs)
            if by_hidden is not None:
                exp.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=exp.dtype))  # p - 1_y
                by_logits = exp.div_(-temperature) if slope is None else exp.mul_(slope).div_(-temperature)
                torch.mm(by_logits.mul_(kind.scale).to(hidden.dtype), weight, out=by_hidden[at : at + rows])
        ctx.by_hidden, ctx.kind, ctx.temperature, ctx.entropic = by_hidden, kind, temperature, entropic
        ctx.slope = slope if is_one else None
        more = (hidden, weight, labels, entropy, *((logs,) if is_one else ()))
        ctx.save_for_backward(*(() if is_kept else more))
        if not entropic:
            ctx.mark_non_differentiable(entropy)
        return found, entropy

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if ctx.by_hidden is not None:
            return ctx.by_hidden * outputs[0][:, None].to(ctx.by_hidden.dtype), None, None, None, None, None
        hidden, weight, labels, entropy, *kept = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        rows = chunk_rows(weight)
        for at in range(0, len(hidden), rows):
            part, stretch = hidden[at : at + rows], slice(at, at + rows)
            if kept:
                logs, slope = kept[0], ctx.slope
            else:
                logits = logits_of(part, weight, ctx.kind)
                slope = _slope(logits, ctx.kind)
                logs = _log_softmax(logits, ctx.temperature)
            by_log_prob = outputs[0][stretch, None]
            exp = logs.exp()
            by_logits = exp * -by_log_prob
            by_logits.scatter_add_(1, labels[stretch, None], by_log_prob.to(by_logits.dtype))
            if ctx.entropic:
                by_logits -= exp * (logs + entropy[stretch, None]) * outputs[1][stretch, None]
            by_logits = by_logits if slope is None else by_logits.mul_(slope)
            by_logits = by_logits.mul_(ctx.kind.scale / ctx.temperature).to(hidden.dtype)
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[stretch])
            if by_weight is not None:
                by_weight.addmm_(by_logits.T, part)
        return by_hidden, by_weight, None, None, None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Of logits [N, V] / t, in their memory."""
    logits = logits if temperature == 1.0 else logits.div_(temperature)
    return logits.sub_(logits.logsumexp(dim=1, keepdim=True))


def _slope(logits: Tensor, kind: TokenLoss) -> Tensor | None:
    """[N, V] derivative of capped logits by those that are not; None: they are not capped."""
    return None if kind.softcap is None else 1 - (logits / kind.softcap).square()
