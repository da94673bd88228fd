"""ORPO: odds instead of a reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .pairs import Pairs, Settings


def orpo(pairs: Pairs, settings: Settings) -> Tensor:
    """[P] -beta log sigma(log odds(chosen) - log odds(rejected)), with odds = p / (1 - p) and p the geometric mean of
    the token probabilities of an answer (Hong et al., arXiv:2403.07691, eq. 6). The paper adds the SFT loss of the
    chosen answer."""
    chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
    return -settings.beta * logsigmoid((chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected)))


def _log1mexp(value: Tensor) -> Tensor:
    """log(1 - exp(value)) of negative values, without loss of digits (Mächler, 2012)."""
    return torch.where(value > -0.693, torch.log(-torch.expm1(value)), torch.log1p(-torch.exp(value)))
