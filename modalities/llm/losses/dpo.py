"""Losses of pairs against a reference: DPO and what followed, by TRL's names.

With the log-ratios c = log pi(chosen) / ref(chosen) and r = log pi(rejected) / ref(rejected), the scores s(c), s(r) of
an f-divergence (s(x) = x for the reverse KL), the margin d = s(c) - s(r), b = beta and e = label smoothing:

| name | loss of a pair |
| --- | --- |
| sigmoid | -log sigma(b d) (Rafailov et al., DPO, arXiv:2305.18290) |
| robust | [-(1 - e) log sigma(b d) + e log sigma(-b d)] / (1 - 2 e) (Chowdhury et al., arXiv:2403.00409) |
| hinge | max(0, 1 - b d) (Liu et al., RSO, arXiv:2309.06657; Zhao et al., SLiC, arXiv:2305.10425) |
| ipo | (s(c) / tokens - s(r) / tokens - 1 / (2 b))^2 (Azar et al., arXiv:2310.12036; means, as its authors did) |
| exo_pair | KL(sigma(b d) to 1 - e) (Ji et al., EXO, arXiv:2402.00856, eq. 16) |
| nca_pair | -log sigma(b c) - [log sigma(-b c) + log sigma(-b r)] / 2 (Chen et al., arXiv:2402.05369) |
| bco_pair | -log sigma(b c) - log sigma(-b r) (Jung et al., arXiv:2404.04656, without its shift) |
| sppo_hard | (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2 (Wu et al., arXiv:2405.00675, eq. 4.7 with P = 1) |
| aot, aot_unpaired | sigmoid with e, of sorted margins (Melnyk et al., arXiv:2406.05882) |
| apo_zero | 1 - sigma(b c) + sigma(b r) (D'Oosterlinck et al., arXiv:2408.06266, eq. 7) |
| apo_down | sigma(b c) + 1 - sigma(b (c - r)) (the same, eq. 8) |
| discopop | (1 - m) (-log sigma(b d)) + m exp(-b d), m = sigma(b d / tau) (Lu et al., arXiv:2406.08414, eq. 5) |
| sigmoid_norm | sigmoid of s(c) / tokens - s(r) / tokens (Meng et al., arXiv:2405.14734, with a reference) |

The losses of aot compare the distributions of a batch: its pairs are sorted together, so they depend on what is in one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .pairs import PairLoss, Pairs, Settings


def ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """([P] log pi / ref of the chosen answers, [P] of the rejected ones)."""
    return pairs.chosen - pairs.reference_chosen, pairs.rejected - pairs.reference_rejected


def score(ratio: Tensor, settings: Settings) -> Tensor:
    """f'(t) of an f-divergence at t = exp(ratio), but for a constant (Wang et al., f-DPO, arXiv:2309.16240): log t;
    1 - 1 / t; log(2 t / (1 + t)); (t^(a - 1) - 1) / (a - 1), which is log t for a = 1."""
    if settings.f_divergence == "forward_kl":
        return 1 - torch.exp(-ratio)
    if settings.f_divergence == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    power = settings.f_alpha - 1
    if settings.f_divergence == "alpha_divergence" and abs(power) >= 1e-6:
        return torch.expm1((power * ratio).clamp(max=80)) / power  # else float32 overflows
    return ratio


def _scores(pairs: Pairs, settings: Settings) -> tuple[Tensor, Tensor]:
    chosen, rejected = ratios(pairs)
    return score(chosen, settings), score(rejected, settings)


def _margin(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = _scores(pairs, settings)
    return settings.beta * (chosen - rejected)


def _mean_margin(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = _scores(pairs, settings)
    return chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens


def sigmoid(pairs: Pairs, settings: Settings) -> Tensor:
    return -logsigmoid(_margin(pairs, settings))


def robust(pairs: Pairs, settings: Settings) -> Tensor:
    margin, swapped = _margin(pairs, settings), settings.label_smoothing
    return (swapped * logsigmoid(-margin) - (1 - swapped) * logsigmoid(margin)) / (1 - 2 * swapped)


def hinge(pairs: Pairs, settings: Settings) -> Tensor:
    return torch.relu(1 - _margin(pairs, settings))


def ipo(pairs: Pairs, settings: Settings) -> Tensor:
    return (_mean_margin(pairs, settings) - 1 / (2 * settings.beta)).square()


def exo_pair(pairs: Pairs, settings: Settings) -> Tensor:
    margin, swapped = _margin(pairs, settings), settings.label_smoothing
    right = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-swapped))
    return right + (-margin).sigmoid() * (logsigmoid(-margin) - math.log(swapped))


def nca_pair(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = (settings.beta * ratio for ratio in ratios(pairs))
    return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))


def bco_pair(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = (settings.beta * ratio for ratio in ratios(pairs))
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def sppo_hard(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = ratios(pairs)
    wanted = 0.5 / settings.beta
    return (chosen - wanted).square() + (rejected + wanted).square()


def _smoothed(margin: Tensor, settings: Settings) -> Tensor:
    swapped = settings.label_smoothing
    return -(1 - swapped) * logsigmoid(margin) - swapped * logsigmoid(-margin)


def aot(pairs: Pairs, settings: Settings) -> Tensor:
    model, reference = pairs.chosen - pairs.rejected, pairs.reference_chosen - pairs.reference_rejected
    return _smoothed(settings.beta * (model.sort().values - reference.sort().values), settings)


def aot_unpaired(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = ratios(pairs)
    return _smoothed(settings.beta * (chosen.sort().values - rejected.sort().values), settings)


def apo_zero(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = (settings.beta * ratio for ratio in ratios(pairs))
    return 1 - chosen.sigmoid() + rejected.sigmoid()


def apo_down(pairs: Pairs, settings: Settings) -> Tensor:
    chosen, rejected = (settings.beta * ratio for ratio in ratios(pairs))
    return chosen.sigmoid() + 1 - (chosen - rejected).sigmoid()


def discopop(pairs: Pairs, settings: Settings) -> Tensor:
    margin = _margin(pairs, settings)
    mix = (margin / settings.discopop_tau).sigmoid()
    return (1 - mix) * -logsigmoid(margin) + mix * torch.exp(-margin)


def sigmoid_norm(pairs: Pairs, settings: Settings) -> Tensor:
    return -logsigmoid(settings.beta * _mean_margin(pairs, settings))


LOSSES: dict[str, PairLoss] = {
    loss.__name__: loss
    for loss in (
        sigmoid, robust, hinge, ipo, exo_pair, nca_pair, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down,
        discopop, sigmoid_norm,
    )
}  # fmt: skip
