"""pass@k and mean rewards: against counting all subsets, with missing rewards, by slice."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from luthier.modalities.llm.rl.evaluation import Judged, means, parts, pass_at

NAN = float("nan")


@pytest.mark.parametrize(("number", "right"), [(5, 0), (5, 1), (5, 3), (5, 5), (1, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(number: int, right: int) -> None:
    answers = [True] * right + [False] * (number - right)
    for k in range(1, number + 1):
        subsets = list(combinations(answers, k))
        assert pass_at(number, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def judged(topic: str, *rewards: float) -> Judged:
    by_name = {"exact": tuple(rewards), "length": tuple(2 * one for one in rewards)}
    number = len(rewards)
    return Judged({"topic": topic}, "rows:1", "?", ("!",) * number, rewards, by_name, (3,) * number, (True,) * number)


RECORDS = [judged("a", 1.0, 0.0, 0.0), judged("a", 1.0, 1.0, NAN), judged("b", 0.5, 0.0, 0.0)]


def test_means_leave_missing_rewards_out() -> None:
    found = means(RECORDS, (1, 2), 1.0)
    assert found["reward"] == pytest.approx(3.5 / 8)
    assert found["reward/length"] == pytest.approx(7 / 8)
    assert found["pass@1"] == pytest.approx((1 / 3 + 2 / 3 + 0) / 3)
    assert found["pass@2"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert (found["answers"], found["unscored"]) == (9, 1)
    for name in ("reward", "reward/exact", "reward/length", "pass@1", "pass@2"):
        sums = [parts(one, (1, 2), 1.0)[name] for one in RECORDS]
        assert sum(one[0] for one in sums) / sum(one[1] for one in sums) == pytest.approx(found[name])


def test_metrics_by_slice(task_of) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"What of {at}?", "answer": "a"} for at in range(4)]
    overrides = (
        "rewards=[{kind: exact}]", "evaluate.answers=3", "evaluate.pass_at=[1, 2]", "evaluate.slices=[topic]",
        "evaluate.sampling={temperature: 1.0}", "rollout.max_new_tokens=4",
    )  # fmt: skip
    found = task_of(*overrides, rows=rows, kind="llm.grpo").task.score(RECORDS)
    assert found["slices"]["topic"]["a"]["reward"] == pytest.approx(3 / 5)
    assert found["slices"]["topic"]["b"]["pass@2"] == 0
    assert found["reward"] == pytest.approx(3.5 / 8)
