"""Advantages against loops in numpy that follow their papers; NaN, flat groups, several ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from luthier.modalities.llm.rl.advantages import EPS, advantages, deviation, is_flat, to_go, whitened

REWARDS = np.array([[1.0, 0, 0.5, 0], [1, 1, 1, 1], [0.2, 0.9, 0.9, -2], [0, 0, 0, 1]])
HOLES = np.array([[1.0, np.nan, 0.5, 0], [1, 1, np.nan, 1], [np.nan, 0.9, np.nan, np.nan], [np.nan] * 4])


def expected(rewards: np.ndarray, baseline: str, scale: str) -> np.ndarray:
    found = np.full_like(rewards, np.nan)
    for row, group in enumerate(rewards):
        known = group[~np.isnan(group)]
        for at, reward in enumerate(group):
            if np.isnan(reward):
                continue
            if baseline == "group":
                found[row, at] = reward - known.mean()
            elif baseline == "leave_one_out":
                others = np.delete(group, at)
                others = others[~np.isnan(others)]
                found[row, at] = reward - others.mean() if len(others) else 0.0
            else:
                found[row, at] = reward
        if scale == "group":
            found[row] /= (known.std(ddof=1) if len(known) > 1 else 0.0) + EPS
    if scale == "batch":
        found /= rewards[~np.isnan(rewards)].std(ddof=1) + EPS
    if scale == "whiten":
        known = found[~np.isnan(found)]
        found = (found - known.mean()) / (known.std(ddof=1) + EPS)
    return found


@pytest.mark.parametrize("rewards", [REWARDS, HOLES], ids=["whole", "holes"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "whiten", "none"])
def test_advantages(rewards: np.ndarray, baseline: Any, scale: Any) -> None:
    found = advantages(rewards, baseline, scale)
    np.testing.assert_allclose(found, expected(rewards, baseline, scale), rtol=1e-9, atol=1e-9)


def test_fault_22_a_missing_reward_leaves_its_group_as_if_it_had_not_been_drawn() -> None:
    for baseline in ("group", "leave_one_out"):
        for scale in ("group", "none"):
            whole = advantages(np.array([[1.0, 0.5, 0.0]]), baseline, scale)  # type: ignore[arg-type]
            holed = advantages(np.array([[1.0, np.nan, 0.5, 0.0]]), baseline, scale)  # type: ignore[arg-type]
            np.testing.assert_array_equal(holed[0, [0, 2, 3]], whole[0])
            assert np.isnan(holed[0, 1])


def test_flat_groups_have_exactly_no_advantage() -> None:
    """0.1 + 0.2 is no third of its triple: a mean may differ from what all are."""
    rewards = np.array([[0.1 + 0.2] * 3, [np.nan, 0.7, np.nan], [0.1, 0.1, 0.2]])
    assert is_flat(rewards).tolist() == [True, True, False]
    for scale in ("group", "batch", "none"):
        found = advantages(rewards, "group", scale)  # type: ignore[arg-type]
        assert (found[0] == 0).all()
        assert found[1, 1] == 0


@pytest.mark.parametrize("scale", ["group", "batch", "whiten", "none"])
def test_over_two_ranks_it_is_as_on_one(scale: Any) -> None:
    whole = advantages(REWARDS, "group", scale)

    def together(parts: list[np.ndarray]) -> list[np.ndarray]:
        barrier, shared, found = threading.Barrier(2), [np.zeros(0)] * 2, [np.zeros(0)] * 2

        def rank(at: int) -> None:
            def total(values: np.ndarray) -> np.ndarray:
                barrier.wait()
                shared[at] = np.array(values)
                barrier.wait()
                return shared[0] + shared[1]

            found[at] = advantages(parts[at], "group", scale, total)

        threads = [threading.Thread(target=rank, args=(at,)) for at in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return found

    np.testing.assert_allclose(np.concatenate(together([REWARDS[:1], REWARDS[1:]])), whole, rtol=1e-12)


def test_deviations_of_little() -> None:
    assert deviation(np.array([np.nan, 2.0])) == (2.0, 0.0)
    assert deviation(np.array([np.nan])) == (0.0, 0.0)
    assert np.isnan(whitened(np.array([np.nan, 1.0, 3.0]))).tolist() == [True, False, False]


def test_penalties_to_go() -> None:
    found = to_go(np.array([1.0, 2, 3, 4, 5]), np.array([2, 3]))
    assert found.tolist() == [3, 2, 12, 9, 5]
