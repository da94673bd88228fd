"""The loss of token-and-duration transducers on a CPU; NeMo's own runs on CUDA devices only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NEVER = -1e30


def tdt(
    joint: Tensor, tokens: Tensor, frames: Tensor, lengths: Tensor, durations: Sequence[int], sigma: float = 0.0
) -> Tensor:
    """Negative log-likelihood (Xu et al., ICML 2023, arXiv:2304.06795, equation 7).

    Args:
        joint: the joint network's output [B, T, U + 1, V + 1 + number of durations]: tokens, the blank, durations.
        tokens: [B, U].
        frames: [B].
        lengths: tokens of each, [B].
        durations: frames that a step may skip; 0 is for tokens only.
        sigma: what is taken off each token's log-probability (logit under-normalisation, section 3.3).

    Returns:
        [B], in nats.
    """
    number = len(durations)
    labels = joint[..., :-number].log_softmax(-1) - sigma
    skips = joint[..., -number:].log_softmax(-1)
    blank = labels[..., -1]  # [B, T, U + 1]
    texts = tokens[:, None, :, None].expand(-1, joint.shape[1], -1, 1)
    said = labels[:, :, : tokens.shape[1]].gather(3, texts)[..., 0]  # [B, T, U]
    steps = list(enumerate(durations))
    alpha: dict[tuple[int, int], Tensor] = {(0, 0): joint.new_zeros(len(joint))}

    def arriving(t: int, u: int) -> list[Tensor]:
        waits = [alpha[t - d, u] + blank[:, t - d, u] + skips[:, t - d, u, n] for n, d in steps if 0 < d <= t]
        if not u:
            return waits
        says = [alpha[t - d, u - 1] + said[:, t - d, u - 1] + skips[:, t - d, u - 1, n] for n, d in steps if d <= t]
        return waits + says

    for t in range(joint.shape[1]):
        for u in range(joint.shape[2]):
            if t or u:
                alpha[t, u] = torch.stack([*arriving(t, u), joint.new_full((len(joint),), _NEVER)]).logsumexp(0)
    found = []
    for row, (end, length) in enumerate(zip(frames.tolist(), lengths.tolist(), strict=True)):
        last = [
            alpha[end - d, length][row] + blank[row, end - d, length] + skips[row, end - d, length, n]
            for n, d in steps
            if 0 < d <= end
        ]
        found.append(torch.stack([*last, joint.new_tensor(_NEVER)]).logsumexp(0))
    return -torch.stack(found)
