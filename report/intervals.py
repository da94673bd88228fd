"""How sure a metric is: bootstrap intervals from what single examples add to it (Efron and Tibshirani, 1993)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

DRAWS = 1000
SHARE = 0.95
_NUMBERS = 4_000_000
"""Numbers in memory at a time."""

Part = tuple[np.ndarray, np.ndarray]
"""[N] numerators and [N] denominators; NaN where an example has no part in the metric."""


def intervals(parts: Mapping[str, Part], draws: int = DRAWS, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Bounds between which 95 % of the metrics lie when the examples are drawn anew, with replacement.

    Args:
        parts: of each metric.
        draws: how often.
        seed: of the draws.

    Returns:
        (low, high) of each metric that at least two examples have a part in.
    """
    drawn = _drawn(parts, draws, seed)
    low, high = (1 - SHARE) / 2, (1 + SHARE) / 2
    found = {}
    for name, values in drawn.items():
        if np.isfinite(parts[name][0]).sum() > 1 and np.isfinite(values).any():
            found[name] = (float(np.nanquantile(values, low)), float(np.nanquantile(values, high)))
    return found


@dataclass(frozen=True)
class Difference:
    """A metric of two runs on the same examples, the second less the first.

    Args:
        value: the difference.
        low, high: bounds of 95 %.
        p: share of draws, doubled, in which the difference has the other sign or is zero: how probable a difference
            like this is where there is none.
    """

    value: float
    low: float
    high: float
    p: float


def paired(
    one: Mapping[str, Part], other: Mapping[str, Part], draws: int = DRAWS, seed: int = 0
) -> dict[str, Difference]:
    """Differences of the metrics of two runs, when the same examples are drawn for both.

    Args:
        one, other: parts of the same examples in the same order.
    """
    names = [name for name in one if name in other]
    both = {f"{side}{name}": parts[name] for side, parts in (("0", one), ("1", other)) for name in names}
    drawn = _drawn(both, draws, seed)
    found = {}
    for name in names:
        apart = drawn[f"1{name}"] - drawn[f"0{name}"]
        apart = apart[np.isfinite(apart)]
        if not len(apart):
            continue
        value = ratio(other[name]) - ratio(one[name])
        tail = min(float((apart <= 0).mean()), float((apart >= 0).mean()))
        low, high = (float(np.quantile(apart, at)) for at in ((1 - SHARE) / 2, (1 + SHARE) / 2))
        found[name] = Difference(value, low, high, min(1.0, 2 * max(tail, 1 / (draws + 1))))
    return found


def ratio(part: Part) -> float:
    """The metric of all examples."""
    return float(np.nansum(part[0])) / (float(np.nansum(part[1])) or float("nan"))


def _drawn(parts: Mapping[str, Part], draws: int, seed: int) -> dict[str, np.ndarray]:
    """[draws] values of each metric."""
    if not parts:
        return {}
    columns = np.nan_to_num(np.stack([column for part in parts.values() for column in part], axis=1))
    sums = np.concatenate([counts @ columns for counts in _counts(len(columns), draws, seed)])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sums[:, ::2] / sums[:, 1::2]
    return {name: np.where(np.isfinite(ratios[:, at]), ratios[:, at], np.nan) for at, name in enumerate(parts)}


def _counts(number: int, draws: int, seed: int) -> Iterator[np.ndarray]:
    """[d, N] how often each example is drawn."""
    generator, chances = np.random.default_rng(seed), np.full(number, 1 / number)
    size = max(1, _NUMBERS // number)
    for done in range(0, draws, size):
        yield generator.multinomial(number, chances, size=min(size, draws - done)).astype(float)
