"""Bootstrap intervals against what is known of a mean, and paired differences."""

from __future__ import annotations

import numpy as np
import pytest

from luthier.report.intervals import intervals, paired, ratio


def scores(number: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    values = (np.arange(number) < share * number).astype(float)
    return values, np.ones(number)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    """Of 400 answers of which 30 % are right the mean has the standard error sqrt(0.3 x 0.7 / 400); within 10 %, as
    1000 draws allow: the error of a 97.5 % quantile is about sqrt(0.025 x 0.975 / 1000) / 0.058 = 0.085 of it."""
    low, high = intervals({"accuracy": scores(400, 0.3)})["accuracy"]
    error = np.sqrt(0.3 * 0.7 / 400)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert (high + low) / 2 == pytest.approx(0.3, abs=0.2 * error)


def test_the_interval_is_of_the_ratio_of_sums_not_of_a_mean_of_ratios() -> None:
    """One text of 90 words without an error, nine of one word each that is wrong: the rate is 9 / 99, and no draw is
    below 0 or above 1; the mean of ratios would be 0.9."""
    wrong, words = np.array([0.0] + [1.0] * 9), np.array([90.0] + [1.0] * 9)
    low, high = intervals({"wer": (wrong, words)})["wer"]
    assert 0 < low < ratio((wrong, words)) == 9 / 99 < high <= 1


def test_examples_without_a_part_don_t_count() -> None:
    values, ones = scores(50, 0.5)
    nan = np.full(50, np.nan)
    more = np.concatenate([values, nan]), np.concatenate([ones, nan])
    assert ratio(more) == 0.5
    low, high = intervals({"x": more})["x"]
    assert low < 0.5 < high
    assert intervals({"x": (np.array([1.0, np.nan]), np.array([1.0, np.nan]))}) == {}, "of one example nothing is known"
    assert intervals({}) == {}


def test_the_same_draws_give_the_same_bounds() -> None:
    assert intervals({"x": scores(30, 0.4)}) == intervals({"x": scores(30, 0.4)})


def test_a_paired_difference_is_seen_where_the_intervals_overlap() -> None:
    """200 texts of very different difficulty, each a little worse in the second run: paired, that is certain."""
    draw = np.random.default_rng(0)
    hard, words = draw.integers(0, 20, 200).astype(float), np.full(200, 20.0)
    worse = hard + (np.arange(200) % 4 == 0)
    one, other = {"wer": (hard, words)}, {"wer": (worse, words)}
    first, second = intervals(one)["wer"], intervals(other)["wer"]
    assert first[1] > second[0], "they overlap"
    found = paired(one, other)["wer"]
    assert found.value == pytest.approx(50 / 4000)
    assert found.low > 0
    assert found.p < 0.01


def test_no_difference_is_none() -> None:
    same = {"wer": (np.array([1.0, 0.0, 2.0]), np.full(3, 10.0))}
    found = paired(same, same)["wer"]
    assert (found.value, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_what_goes_both_ways_is_noise() -> None:
    values = np.arange(100) % 2.0
    found = paired({"x": (values, np.ones(100))}, {"x": (1 - values, np.ones(100))})["x"]
    assert found.value == 0.0
    assert found.low < 0 < found.high
    assert found.p > 0.5
