"""CPO: DPO with a uniform reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from .pairs import Pairs, Settings


def cpo(pairs: Pairs, settings: Settings) -> Tensor:
    """[P] -log sigma(beta (log pi(chosen) - log pi(rejected))) (Xu et al., arXiv:2401.08417, eq. 3); with label
    smoothing e, (1 - e) of it and e of the loss of swapped answers. The paper adds the SFT loss of the chosen one."""
    margin = settings.beta * (pairs.chosen - pairs.rejected)
    swapped = settings.label_smoothing
    return -(1 - swapped) * logsigmoid(margin) - swapped * logsigmoid(-margin)
