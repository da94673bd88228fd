"""Bradley-Terry: the better answer of a pair wins by the difference of scores."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, centering: float = 0.0) -> Tensor:
    """[P] -log sigma(chosen - rejected - margin) + centering (chosen + rejected)^2 (Bradley & Terry, 1952; margins:
    Touvron et al., Llama 2, arXiv:2307.09288, eq. 2; centering: Eisenstein et al., arXiv:2312.09244).

    Args:
        chosen: [P] scores of the better answers.
        rejected: [P] scores of the others.
        margin: [P] by how much the better answer is better.
        centering: weight of what keeps scores around 0, as only their differences matter.
    """
    losses = -logsigmoid(chosen - rejected - margin)
    return losses + centering * (chosen + rejected).square() if centering else losses
