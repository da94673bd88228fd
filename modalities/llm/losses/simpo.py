"""SimPO: means over tokens instead of a reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from .pairs import Pairs, Settings


def simpo(pairs: Pairs, settings: Settings) -> Tensor:
    """[P] -log sigma(beta (mean log pi(chosen) - mean log pi(rejected)) - gamma), means over tokens (Meng et al.,
    arXiv:2405.14734, eq. 6); with label smoothing e, (1 - e) of it and e of the loss of swapped answers."""
    margin = settings.beta * (pairs.chosen_mean - pairs.rejected_mean) - settings.simpo_gamma
    swapped = settings.label_smoothing
    return -(1 - swapped) * logsigmoid(margin) - swapped * logsigmoid(-margin)
