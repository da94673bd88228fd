"""Parts of FunASR's loss in a form that does less work and gives the same values and gradients, within rounding.

They take the place of the parts of one model; FunASR's own classes stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .network import hasten_network

_ROUNDING = 1e-4
"""How much of a token's weight may be missing where it ends: weights are scaled to sum up to a whole number, which
float32 reaches only nearly."""


def hasten(model: Any) -> None:
    """Give a FunASR model the faster parts, as far as it has what they replace."""
    hasten_network(model)
    from funasr.losses.label_smoothing_loss import LabelSmoothingLoss  # type: ignore[import-untyped]
    from funasr.models.ctc.ctc import CTC  # type: ignore[import-untyped]
    from funasr.models.paraformer.cif_predictor import (  # type: ignore[import-untyped]
        CifPredictor,
        CifPredictorV2,
    )

    parts: list[Any] = [getattr(model, name, None) for name in ("criterion_att", "ctc", "predictor")]
    criterion, ctc, predictor = parts
    if type(criterion) is LabelSmoothingLoss:
        model.criterion_att = SmoothedCrossEntropy(
            criterion.size, criterion.padding_idx, criterion.smoothing, criterion.normalize_length
        )
    if type(ctc) is CTC and ctc.ctc_type == "builtin" and ctc.reduce:
        ctc.loss_fn = ctc_loss
    if type(predictor) in (CifPredictor, CifPredictorV2) and predictor.threshold == 1:
        predictor.forward = partial(_predict, predictor, predictor.forward)


class SmoothedCrossEntropy(nn.Module):
    """FunASR's `LabelSmoothingLoss` without the matrix of target probabilities: `smoothing` is spread over all classes
    but the right one, and the entropy of the targets is taken off (a Kullback-Leibler divergence).

    Args:
        size: number of classes, V.
        ignored: class id that carries no loss.
        smoothing: probability mass spread.
        by_tokens: divide by the tokens, else by the rows.
    """

    def __init__(self, size: int, ignored: int, smoothing: float, by_tokens: bool):
        super().__init__()
        self.ignored, self.by_tokens = ignored, by_tokens
        self.smoothing = smoothing * size / (size - 1)  # torch spreads over the right class too
        self.entropy = 0.0
        if 0 < smoothing < 1:
            self.entropy = -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(smoothing / (size - 1))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss, in nats, of logits [B, L, V] against ids [B, L]."""
        tokens = (target != self.ignored).sum().to(logits.dtype)
        total = functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=self.ignored, reduction="sum",
            label_smoothing=self.smoothing,
        )  # fmt: skip
        return (total - self.entropy * tokens) / (tokens if self.by_tokens else len(target))


def ctc_loss(logits: Tensor, labels: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """FunASR's `CTC.loss_fn`: the mean over the examples, without those that have too few frames.

    FunASR finds these by their gradient, computed once more than needed; here by their loss.

    Args:
        logits: [T, B, V]; class 0 is the blank.
        labels: [N] ids of all examples, one after the other.
        frames: [B] frames of real audio.
        lengths: [B] number of labels.
    """
    log_probabilities = logits.log_softmax(2)
    losses = functional.ctc_loss(log_probabilities, labels, frames, lengths, reduction="none")
    fits = losses.isfinite()
    if fits.all():
        return losses.sum() / len(losses)
    losses = functional.ctc_loss(log_probabilities, labels, frames, lengths, reduction="none", zero_infinity=True)
    return losses.sum() / fits.sum()


def integrate_and_fire(hidden: Tensor, weights: Tensor, tokens: int, one_by_one: bool = True) -> Tensor:
    """FunASR's `cif`, without its loop over time, and `cif_v1`: token embeddings [B, N, D] of hidden states [B, T, D].

    The weights [B, T] are summed up over time; where the sum passes the next whole number, a token ends, and what
    passes belongs to the next one (Dong & Xu, arXiv:1905.11235). Unlike there, a sum that misses the whole number by
    rounding has reached it, so that a row's last token is never lost.

    Args:
        hidden: the encoder's output.
        weights: each frame's, 0 in padding.
        tokens: embeddings to give, N; more than a row has are 0.
        one_by_one: where a weight is above 1 and two tokens could end in its frame, the second ends in the next frame
            (`cif`); else they become one (`cif_v1`).
    """
    batch, time = weights.shape
    total = weights.cumsum(1, dtype=torch.float32 if weights.device.type == "mps" else torch.float64)
    reached = (total.detach() + _ROUNDING).floor()
    if one_by_one:
        step = torch.arange(time, device=weights.device)
        reached = torch.minimum((reached - step).cummin(1).values + step, step + 1.0)
    fires = reached > functional.pad(reached[:, :-1], (1, 0))
    ended = fires.cumsum(1).clamp(max=tokens)  # tokens, after each frame
    before = functional.pad(ended[:, :-1], (1, 0))
    over = (total - reached).to(weights.dtype).where(fires, 0.0)
    share = weights.new_zeros(batch, tokens + 2, time)  # of each frame in each token
    share = share.scatter_add(1, before[:, None], (weights - over)[:, None])
    share = share.scatter_add(1, before[:, None] + 1, over[:, None])
    rows = torch.arange(tokens, device=weights.device)
    share = share[:, :tokens] * (rows[:, None] < ended[:, -1:, None])  # the token after the last never ends
    return share @ hidden


def _predict(
    predictor: Any,
    original: Callable[..., Any],
    hidden: Tensor,
    target_label: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_id: int = -1,
    mask_chunk_predictor: Tensor | None = None,
    target_label_length: Tensor | None = None,
) -> Any:
    """The forward of `CifPredictor` and `CifPredictorV2` where the number of tokens is given; else the original."""
    if target_label is None or mask is None or mask_chunk_predictor is not None or target_label_length is not None:
        return original(hidden, target_label, mask, ignore_id, mask_chunk_predictor, target_label_length)
    context, first = hidden.transpose(1, 2), type(predictor).__name__ == "CifPredictor"
    output = predictor.cif_conv1d(predictor.pad(context))
    if first:
        output = predictor.dropout(output + context)
    weights = predictor.cif_output(output.transpose(1, 2).relu()).sigmoid()
    weights = (weights * predictor.smooth_factor - predictor.noise_threshold).relu().squeeze(-1)
    weights = weights * mask.squeeze(1).float()
    wanted = (target_label != ignore_id).float().sum(-1)
    counted = weights.sum(-1)
    scaled = weights * (wanted / counted)[:, None]
    embedded = integrate_and_fire(hidden, scaled, target_label.shape[1], one_by_one=first)
    return embedded, counted, scaled, None
