"""What the losses of preference pairs are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of P pairs of answers, each summed over the answer's tokens, in nats.

    Args:
        chosen: [P] of the chosen answers under the model.
        rejected: [P] of the rejected answers under the model.
        reference_chosen: [P] the same under the reference; of losses without a reference never looked at.
        reference_rejected: [P].
        chosen_tokens: [P] tokens of the chosen answers.
        rejected_tokens: [P] tokens of the rejected answers.
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen_mean(self) -> Tensor:
        """[P] log-probability of a token."""
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_tokens


@dataclass(frozen=True)
class Settings:
    """Constants of the losses, by TRL's names where it has them.

    Args:
        beta: strength; the larger, the closer the model is kept to the reference.
        label_smoothing: probability that a pair's answers are swapped.
        f_divergence: how far from the reference is measured: reverse_kl, forward_kl, js_divergence, alpha_divergence.
        f_alpha: alpha of the last.
        discopop_tau: temperature of the mix of discopop.
        simpo_gamma: margin of simpo.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5


PairLoss = Callable[[Pairs, Settings], Tensor]
"""(P pairs, settings) -> [P] loss of each."""
