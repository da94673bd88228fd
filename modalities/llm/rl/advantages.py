"""How much better a completion is than what was to be expected: from rewards [P, G] of G completions for each of P
prompts. A reward that is NaN has no advantage and counts in no mean."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..losses.online import Baseline, Scale

EPS = 1e-4
"""Added to what is divided by."""

Total = Callable[[np.ndarray], np.ndarray]
"""Sums an array over all ranks."""


def alone(values: np.ndarray) -> np.ndarray:
    """The `Total` of one rank."""
    return values


def advantages(rewards: np.ndarray, baseline: Baseline, scale: Scale, total: Total = alone) -> np.ndarray:
    """[P, G] advantages; NaN where the reward is.

    Args:
        rewards: [P, G] float64, of this rank.
        baseline: what is subtracted: the mean of the `group`, the mean of the others in it (`leave_one_out`, Kool et
            al., 2019; Ahmadian et al., arXiv:2402.14740), or nothing.
        scale: what it is divided by then: the standard deviation of the rewards in the `group` (arXiv:2402.03300) or in
            the whole `batch`; `whiten`: the advantages of the batch get mean 0 and deviation 1 (REINFORCE++,
            arXiv:2501.03262); or nothing. Deviations are of samples (divided by n - 1).
        total: sums over the ranks of the batch.
    """
    found: np.ndarray = rewards - _baseline(rewards, baseline)
    if baseline != "none":
        found[is_flat(rewards)[:, None] & ~np.isnan(rewards)] = 0.0  # exactly, whatever the rounding
    if scale == "group":
        return found / (_deviation(rewards) + EPS)
    if scale == "batch":
        return found / (deviation(rewards, total)[1] + EPS)
    return whitened(found, total) if scale == "whiten" else found


def whitened(values: np.ndarray, total: Total = alone) -> np.ndarray:
    """Values with the mean 0 and the deviation 1 over all ranks; of any shape, NaN left out."""
    mean, spread = deviation(values, total)
    return (values - mean) / (spread + EPS)


def deviation(values: np.ndarray, total: Total = alone) -> tuple[float, float]:
    """(mean, standard deviation of a sample) over all ranks, NaN left out; (0, 0) of less than two values."""
    known = values[~np.isnan(values)].astype(np.float64)
    count, first = total(np.array([len(known), known.sum()]))
    mean = float(first / max(count, 1))
    (second,) = total(np.array([np.square(known - mean).sum()]))
    return mean, float(np.sqrt(second / (count - 1))) if count > 1 else 0.0


def is_flat(rewards: np.ndarray) -> np.ndarray:
    """[P] whether a group's rewards are all the same, or fewer than two are known: its completions teach nothing that
    could be compared."""
    low = np.where(np.isnan(rewards), np.inf, rewards).min(axis=1)
    high = np.where(np.isnan(rewards), -np.inf, rewards).max(axis=1)
    return np.asarray(high <= low)


def to_go(penalties: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[R] for each token the sum of the penalties [R] from it to the end of its completion, of `counts` [A] tokens."""
    found = np.empty(len(penalties))
    for begin, end in zip(np.cumsum(counts) - counts, np.cumsum(counts), strict=True):
        found[begin:end] = np.cumsum(penalties[begin:end][::-1])[::-1]
    return found


def gae(rewards: np.ndarray, values: np.ndarray, counts: np.ndarray, gamma: float, decay: float) -> np.ndarray:
    """[R] generalised advantage estimates (Schulman et al., arXiv:1506.02438, eq. 16): over the rest of its completion,
    after which nothing is expected, the sum of (gamma decay)^l (r + gamma V' - V), l tokens later.

    Args:
        rewards: [R] for each token.
        values: [R] V, expected before it.
        counts: [A] tokens of each completion.
        gamma: what a later reward is worth, per token.
        decay: lambda; 1: rewards to come less V, 0: the next token alone.
    """
    found = np.empty(len(rewards))
    for begin, end in zip(np.cumsum(counts) - counts, np.cumsum(counts), strict=True):
        estimate = after = 0.0
        for at in range(end - 1, begin - 1, -1):
            estimate = float(rewards[at]) + gamma * after - float(values[at]) + gamma * decay * estimate
            after, found[at] = float(values[at]), estimate
    return found


def _baseline(rewards: np.ndarray, baseline: Baseline) -> np.ndarray:
    """[P, G] or [P, 1]; where a group has no other known reward, the reward itself or NaN."""
    if baseline == "none":
        return np.zeros((len(rewards), 1))
    known = ~np.isnan(rewards)
    count, whole = known.sum(axis=1, keepdims=True), np.nansum(rewards, axis=1, keepdims=True)
    if baseline == "group":
        return np.asarray(whole / np.maximum(count, 1))
    return np.where(count > 1, (whole - rewards) / np.maximum(count - 1, 1), rewards)


def _deviation(rewards: np.ndarray) -> np.ndarray:
    """[P, 1] standard deviation of each group's known rewards; 0 of less than two."""
    known = ~np.isnan(rewards)
    count = known.sum(axis=1, keepdims=True)
    mean = np.nansum(rewards, axis=1, keepdims=True) / np.maximum(count, 1)
    square = np.nansum(np.square(rewards - mean), axis=1, keepdims=True)
    return np.where(count > 1, np.sqrt(square / np.maximum(count - 1, 1)), 0.0)
