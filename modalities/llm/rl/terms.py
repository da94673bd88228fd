"""What the losses of the online trainings share beside their formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from ..losses.kl import divergence
from ..losses.sampled import Sampled, Settings
from .meter import Meter
from .sections import RolloutSection

MEASURED = ("entropy", "kl", "clip_low", "clip_high", "engine_kl")


def correction(given: Sampled, engine: Tensor, section: RolloutSection) -> Tensor:
    """[R] truncated trainer's / engine's probability, when the completions were drawn."""
    ratio = given.old - engine
    if section.correction == "completion":
        ratio = given.spread(given.summed(ratio))
    return ratio.exp().clamp(max=section.correction_cap)


@torch.no_grad()
def measure(
    meter: Meter,
    given: Sampled,
    ratio: Tensor,
    settings: Settings,
    entropy: Tensor,
    engine: Tensor,
    reference: Tensor | None,
    counted: Tensor,
) -> None:
    """Means over the tokens that are trained: the entropy; the KL from the reference (k3) and from the engine (k3);
    shares of tokens that are clipped below and above.

    Args:
        meter: has the names `MEASURED`.
        given: the tokens [R].
        ratio: [R] as the loss has it.
        settings: where it is clipped.
        entropy: [R].
        engine: [R] log-probabilities of the engine.
        reference: [R] of the reference, if there is one.
        counted: [R] 1 where a token counts.
    """
    count = counted.sum()
    meter.add("entropy", (entropy * counted).sum(), count)
    if reference is not None:
        meter.add("kl", (divergence(given.log_probs, reference, "k3") * counted).sum(), count)
    meter.add("engine_kl", (divergence(engine, given.old, "k3") * counted).sum(), count)
    low = (ratio < 1 - settings.clip_low) & (given.advantages < 0)
    high = (ratio > 1 + settings.clip_high) & (given.advantages > 0)
    meter.add("clip_low", (low * counted).sum(), count)
    meter.add("clip_high", (high * counted).sum(), count)
