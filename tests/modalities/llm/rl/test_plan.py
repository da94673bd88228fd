"""The batches of rollouts: each batch as often and in the order that it should come, what is known ahead, resuming."""

from __future__ import annotations

import pytest

from luthier.common.data.plan import Bounds, Plan
from luthier.modalities.llm.rl.plan import RolloutPlan, place_of


def plan(steps: int, per_step: int = 2, ranks: int = 1, examples: int = 3) -> Plan:
    return Plan([1.0] * 20, Bounds(examples, joined=True), seed=3, ranks=ranks, per_step=per_step, steps=steps)


def test_one_pass_is_the_plan_itself() -> None:
    base = plan(6)
    found = RolloutPlan(base, 4, 1)
    assert (found.total, found.steps) == (base.total, base.steps)
    assert [(b.number, b.indices) for b in found.batches()] == [(b.number, b.indices) for b in base.batches()]
    assert found.epoch_ends() == base.epoch_ends()
    assert [found.fraction(n) for n in range(13)] == [base.fraction(n) for n in range(13)]


def test_passes_repeat_the_batches_of_each_rollout() -> None:
    base = plan(4)  # 8 batches, in rollouts of 4, each 3 times
    found = RolloutPlan(base, 4, 3, steps=11)
    assert found.total == 22
    numbers = [next(b.number for b in base.batches() if b.indices == one.indices) for one in found.batches()]
    assert numbers == [*([0, 1, 2, 3] * 3), *([4, 5, 6, 7] * 3)][:22]
    assert [b.number for b in found.batches()] == list(range(22))
    assert [place_of(number, 4, 3) for number in (0, 5, 11, 12, 21)] == [
        (0, 0, 0), (0, 1, 1), (0, 2, 3), (12, 0, 0), (12, 2, 1)
    ]  # fmt: skip
    fractions = [found.fraction(number) for number in range(25)]
    assert fractions == sorted(fractions)
    assert fractions[24] == base.fraction(8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_batch_of_a_rollout_brings_the_others(ranks: int) -> None:
    base = plan(4, ranks=ranks)
    found = RolloutPlan(base, 4, 2)
    for rank in range(ranks):
        batches = list(found.batches(0, rank))
        for batch in batches:
            first, passed, place = place_of(batch.number, 4, 2)
            if passed or place != rank:
                assert batch.ahead == ()
                continue
            mine = [b for b in batches if place_of(b.number, 4, 2)[:2] == (first, 0)]
            assert [(b.number, b.indices) for b in batch.ahead] == [(b.number, b.indices) for b in mine[1:]]


def test_it_goes_on_from_any_batch() -> None:
    for ranks in (1, 2):
        found = RolloutPlan(plan(4, ranks=ranks), 4, 2)
        for rank in range(ranks):
            whole = list(found.batches(0, rank))
            for start in range(0, found.total, ranks):
                assert list(found.batches(start, rank)) == whole[start // ranks :]


def test_two_ranks_have_the_batches_of_one() -> None:
    one, two = RolloutPlan(plan(4), 4, 2), RolloutPlan(plan(4, ranks=2), 4, 2)
    shared = sorted((b.number, b.indices) for rank in range(2) for b in two.batches(0, rank))
    assert shared == [(b.number, b.indices) for b in one.batches()]
