"""The plan of batches: each example in its turn, within the bounds, the same for every number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from luthier.common.data.plan import Bounds, Plan, Planned, cut
from luthier.common.data.processing import PlanSampler
from luthier.common.errors import DataError, RecipeError

quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)

COSTS = st.lists(st.floats(0.1, 30), min_size=1, max_size=60)
BOUNDS = st.builds(
    Bounds,
    examples=st.integers(1, 9),
    budget=st.one_of(st.none(), st.floats(30, 200)),
    bucket_batches=st.integers(0, 4),
    joined=st.booleans(),
)


def made(costs: list[float], bounds: Bounds, **options: Any) -> Plan:
    return Plan(costs, bounds, **{"seed": 0, "epochs": 1, **options})


def cost(bounds: Bounds, costs: list[float]) -> float:
    """Of a batch: as if all examples were as long as the longest, or what they have if none is padded."""
    return sum(costs) if bounds.joined else max(costs) * len(costs)


def examples(batches: list[Planned]) -> list[int]:
    return [index for batch in batches for index in batch.indices]


def by_step(plan: Plan, start: int = 0) -> dict[int, Counter[int]]:
    """The examples of each optimizer step, over all ranks."""
    found: dict[int, Counter[int]] = {}
    for rank in range(plan.ranks):
        for batch in plan.batches(start, rank):
            found.setdefault(batch.number // plan.per_step, Counter()).update(batch.indices)
    return found


# ------------------------------------------------------------------------------------------------ one pass


@quick
@given(costs=COSTS, bounds=BOUNDS, seed=st.integers(0, 9), epochs=st.integers(1, 3))
def test_every_example_is_exactly_once_in_every_epoch(
    costs: list[float], bounds: Bounds, seed: int, epochs: int
) -> None:
    batches = list(made(costs, bounds, seed=seed, epochs=epochs).batches())
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert [batch.epoch for batch in batches] == sorted(batch.epoch for batch in batches)
    for epoch in range(epochs):
        assert sorted(examples([batch for batch in batches if batch.epoch == epoch])) == list(range(len(costs)))
    assert {batch.epoch for batch in batches} == set(range(epochs))


@quick
@given(costs=COSTS, bounds=BOUNDS, ranks=st.integers(1, 4))
def test_the_bounds_hold_for_every_batch(costs: list[float], bounds: Bounds, ranks: int) -> None:
    plan = made(costs, bounds, ranks=ranks, per_step=ranks)
    batches = [batch for rank in range(ranks) for batch in plan.batches(rank=rank)]
    last = [batch for batch in batches if batch.number >= (plan.steps - 1) * ranks]
    for batch in batches:
        assert len(batch.indices) <= bounds.examples
        if not batch.indices:  # only where there are fewer examples than ranks, at the very end
            assert batch in last
            assert max(len(other.indices) for other in last) == 1
        elif bounds.budget is not None:
            assert cost(bounds, [costs[index] for index in batch.indices]) <= bounds.budget


@quick
@given(costs=COSTS, bounds=BOUNDS)
def test_cutting_keeps_the_order_and_closes_a_batch_only_when_the_next_does_not_fit(
    costs: list[float], bounds: Bounds
) -> None:
    order = list(np.random.default_rng(1).permutation(len(costs)))
    batches = cut(order, np.asarray(costs), bounds)
    assert [index for batch in batches for index in batch] == order
    for batch, after in pairwise(batches):
        longer = [costs[index] for index in (*batch, after[0])]
        over = bounds.budget is not None and cost(bounds, longer) > bounds.budget
        assert over or len(longer) > bounds.examples


@quick
@given(costs=COSTS, bounds=BOUNDS, seed=st.integers(0, 2**63))
def test_a_plan_is_a_function_of_the_seed(costs: list[float], bounds: Bounds, seed: int) -> None:
    first, second = (list(made(costs, bounds, seed=seed, epochs=2).batches()) for _ in range(2))
    assert first == second


def test_epochs_and_seeds_differ() -> None:
    costs = [float(1 + i % 7) for i in range(60)]
    for buckets in (0, 2):
        plan = made(costs, Bounds(4, bucket_batches=buckets), epochs=2)
        first, second = ([b.indices for b in plan.batches() if b.epoch == epoch] for epoch in (0, 1))
        other = [batch.indices for batch in made(costs, Bounds(4, bucket_batches=buckets), seed=1).batches()]
        assert first != second
        assert first != other
        assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}


def test_batches_of_equal_length_are_not_in_order_of_length() -> None:
    """Sorting is for inside a bucket; the batches themselves come shuffled."""
    costs = np.linspace(1, 30, 400)
    plan = made(list(costs), Bounds(4, bucket_batches=100))
    longest = [max(costs[list(batch.indices)]) for batch in plan.batches()]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


# ------------------------------------------------------------------------------------------------ resuming


@quick
@given(costs=COSTS, bounds=BOUNDS, accumulate=st.integers(1, 4), data=st.data())
def test_from_any_batch_a_fresh_plan_gives_the_tail(
    costs: list[float], bounds: Bounds, accumulate: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"epochs": 2.5, "per_step": accumulate, "seed": 3}
    whole = list(made(costs, bounds, **options).batches())
    start = data.draw(st.integers(0, len(whole)))
    assert list(made(costs, bounds, **options).batches(start)) == whole[start:]


@quick
@given(bounds=BOUNDS, start=st.integers(0, 30))
def test_a_sampler_from_anywhere(bounds: Bounds, start: int) -> None:
    plan = made([float(i % 5 + 1) for i in range(40)], bounds, ranks=2, per_step=4, steps=20)
    for rank in (0, 1):
        sampler = PlanSampler(plan, rank)
        whole = list(sampler)
        sampler.start = start * 2
        assert list(sampler) == whole[start:]
        assert len(sampler) == len(whole) - start == plan.total // 2 - start


# ------------------------------------------------------------------------------------------------ ranks


@quick
@given(
    costs=st.lists(st.floats(0.1, 30), min_size=24, max_size=70),
    bounds=BOUNDS,
    windows=st.integers(1, 3),
    epochs=st.sampled_from([1.0, 2.0, 1.3, 0.5]),
)
def test_another_number_of_ranks_sees_the_same_global_batches(
    costs: list[float], bounds: Bounds, windows: int, epochs: float
) -> None:
    per_step = 4 * windows
    plans = [made(costs, bounds, ranks=ranks, per_step=per_step, epochs=epochs) for ranks in (1, 2, 4)]
    assert len({plan.steps for plan in plans}) == 1
    found = [by_step(plan) for plan in plans]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == plans[0].steps


@quick
@given(
    costs=st.lists(st.floats(0.1, 30), min_size=1, max_size=70),
    bounds=BOUNDS,
    ranks=st.sampled_from([2, 3, 4]),
    accumulate=st.integers(1, 3),
)
def test_every_rank_has_equally_many_batches_and_nothing_is_dropped_or_repeated(
    costs: list[float], bounds: Bounds, ranks: int, accumulate: int
) -> None:
    plan = made(costs, bounds, ranks=ranks, per_step=ranks * accumulate)
    shares = [list(plan.batches(rank=rank)) for rank in range(ranks)]
    assert {len(share) for share in shares} == {plan.total // ranks}
    assert sorted(examples([batch for share in shares for batch in share])) == list(range(len(costs)))
    numbers = sorted(batch.number for share in shares for batch in share)
    assert numbers == list(range(plan.total))
    assert all(batch.number % ranks == rank for rank, share in enumerate(shares) for batch in share)


def test_the_last_step_is_shared_out_by_splitting_its_largest_batches() -> None:
    # 10 examples in batches of 4: 4 + 4 + 2; for 4 ranks the first of 4 is split in two.
    bounds = Bounds(4, bucket_batches=0)
    one = made([1.0] * 10, bounds, ranks=1, per_step=4)
    four = made([1.0] * 10, bounds, ranks=4, per_step=4)
    assert [len(batch.indices) for batch in one.batches()] == [4, 4, 2]
    assert [len(batch.indices) for rank in range(4) for batch in four.batches(rank=rank)] == [2, 2, 4, 2]
    assert by_step(one) == by_step(four)


def test_only_the_last_step_differs_between_ranks() -> None:
    bounds = Bounds(3, bucket_batches=2)
    costs = [float(1 + i % 9) for i in range(50)]
    one, two = (made(costs, bounds, ranks=ranks, per_step=4) for ranks in (1, 2))
    shared = sorted((b for rank in (0, 1) for b in two.batches(rank=rank)), key=lambda batch: batch.number)
    last = (one.total - 1) // 4 * 4
    assert shared[:last] == list(one.batches())[:last]


def test_resuming_on_more_ranks_goes_on_with_the_same_steps() -> None:
    costs = [float(1 + i % 9) for i in range(61)]
    whole = by_step(made(costs, Bounds(3), ranks=1, per_step=4, epochs=2))
    plan = made(costs, Bounds(3), ranks=4, per_step=4, epochs=2)
    for step in range(plan.steps):
        assert by_step(plan, start=step * 4) == {at: seen for at, seen in whole.items() if at >= step}


@pytest.mark.parametrize("number", [9, 10, 11])
def test_one_example_a_batch_works_on_any_number_of_ranks(number: int) -> None:
    """With `batch.examples: 1` nothing can be split; what is left over must not stop a run that is nearly done."""
    plan = made([1.0] * number, Bounds(1), ranks=4, per_step=4)
    assert sorted(examples([b for rank in range(4) for b in plan.batches(rank=rank)])) == list(range(number))


def test_a_step_that_cannot_be_shared_equally() -> None:
    with pytest.raises(RecipeError, match=r"train\.devices.*\n.*3 processes for 4 batches"):
        made([1.0] * 10, Bounds(2), ranks=3, per_step=4)


@pytest.mark.parametrize("most", [1, 3])
def test_fewer_examples_than_ranks(most: int) -> None:
    """The step is filled up with empty batches: each rank has one, and each example has its turn."""
    plan = made([1.0, 2.0, 3.0], Bounds(most), ranks=4, per_step=4)
    batches = [batch for rank in range(4) for batch in plan.batches(rank=rank)]
    assert (plan.total, plan.steps) == (4, 1)
    assert [batch.number for batch in batches] == [0, 1, 2, 3]
    assert sorted(batch.indices for batch in batches)[0] == ()
    assert sorted(examples(batches)) == [0, 1, 2]


def test_no_examples_at_all() -> None:
    with pytest.raises(DataError, match="no examples"):
        made([], Bounds(1))


# ------------------------------------------------------------------------------------------------ lengths


def test_an_example_longer_than_the_budget() -> None:
    with pytest.raises(DataError, match="longest example alone exceeds") as caught:
        made([1.0, 31.5, 2.0], Bounds(8, budget=30))
    assert "given:    31.5" in str(caught.value)
    assert "at most 30" in str(caught.value)
    made([1.0, 30.0], Bounds(8, budget=30))


def padding(plan: Plan) -> float:
    real = padded = 0.0
    for batch in plan.batches():
        costs = plan.costs[list(batch.indices)]
        real, padded = real + costs.sum(), padded + costs.max() * len(costs)
    return 1 - real / padded


def test_buckets_save_padding() -> None:
    costs = list(np.random.default_rng(0).gamma(2.0, 4.0, 2000))
    without, few, many = (padding(made(costs, Bounds(16, bucket_batches=n))) for n in (0, 4, 100))
    assert many < few < without
    assert many < 0.1 < 0.4 < without
    budget = padding(made(costs, Bounds(64, budget=200, bucket_batches=100)))
    assert budget < 0.1


def test_sorting_stays_within_a_bucket() -> None:
    """With small buckets, short and long examples are met at all times, and not all short ones first."""
    costs = list(np.linspace(1, 2, 1000))
    plan = made(costs, Bounds(10, bucket_batches=10))
    firsts = [plan.costs[list(batch.indices)].mean() for batch in islice(plan.batches(), 20)]
    assert max(firsts) - min(firsts) > 0.5


# ------------------------------------------------------------------------------------------------ how long


@pytest.mark.parametrize(("steps", "per_step"), [(1, 1), (7, 4), (25, 2)])
def test_steps_go_over_the_data_as_often_as_needed(steps: int, per_step: int) -> None:
    plan = made([1.0] * 10, Bounds(4), epochs=None, steps=steps, per_step=per_step)
    batches = list(plan.batches())
    assert len(batches) == plan.total == steps * per_step
    assert plan.steps == steps
    assert batches[-1].epoch == (steps * per_step - 1) // 3
    for epoch in range(batches[-1].epoch):
        assert sorted(examples([batch for batch in batches if batch.epoch == epoch])) == list(range(10))


@pytest.mark.parametrize(("epochs", "batches"), [(0.5, 5), (1.0, 10), (1.25, 13), (2.0, 20), (0.01, 1)])
def test_parts_of_an_epoch(epochs: float, batches: int) -> None:
    assert made([1.0] * 40, Bounds(4), epochs=epochs).total == batches


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("epochs", [1.0, 2.0, 2.5])
def test_where_a_run_stands_in_epochs(ranks: int, epochs: float) -> None:
    plan = made([1.0] * 39, Bounds(4, bucket_batches=0), epochs=epochs, ranks=ranks, per_step=4)  # 10 batches an epoch
    assert plan.fraction(0) == 0
    assert plan.fraction(5) == 0.5
    assert plan.fraction(plan.total) == epochs
    done = [plan.fraction(number) for number in range(plan.total + 1)]
    assert done == sorted(done)
    whole = int(epochs)
    ends = plan.epoch_ends()
    assert len(ends) == whole
    assert ends[:-1] == [10 * (epoch + 1) for epoch in range(whole - 1)]
    assert ends[-1] == (plan.total if epochs == whole else 10 * whole)
    assert all(plan.fraction(end) == epoch for epoch, end in enumerate(ends, 1))


@quick
@given(costs=COSTS, bounds=BOUNDS, steps=st.integers(1, 40))
def test_an_epoch_ends_with_the_last_batch_of_it(costs: list[float], bounds: Bounds, steps: int) -> None:
    plan = made(costs, bounds, epochs=None, steps=steps)
    batches = list(plan.batches())
    ends = plan.epoch_ends()
    for epoch, end in enumerate(ends):
        assert batches[end - 1].epoch == epoch
        assert end == len(batches) or batches[end].epoch == epoch + 1
    assert batches[-1].epoch in (len(ends), len(ends) - 1)


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("weight", "epochs", "times"), [(1.0, 3, 3), (2.0, 2, 4), (0.5, 2, 1), (1.5, 2, 3), (0.25, 4, 1)]
)
def test_weights_share_out_evenly_over_epochs(weight: float, epochs: int, times: int) -> None:
    number = 21
    plan = made([1.0] * number, Bounds(4), epochs=epochs, weights=[weight] * number)
    batches = list(plan.batches())
    assert Counter(examples(batches)) == dict.fromkeys(range(number), times)
    for epoch in range(epochs):
        seen = Counter(examples([batch for batch in batches if batch.epoch == epoch]))
        assert abs(seen.total() - weight * number) <= 1
        assert all(math.floor(weight) <= count <= math.ceil(weight) for count in seen.values())


def test_each_source_has_its_own_weight() -> None:
    number = 90
    weights = [0.5] * 30 + [2.0] * 30 + [1.5] * 30
    plan = made([1.0] * number, Bounds(8), epochs=2, weights=weights)
    seen = Counter(examples(list(plan.batches())))
    assert [seen[index] for index in range(number)] == [1] * 30 + [4] * 30 + [3] * 30


@quick
@given(weight=st.floats(0.1, 3.5), number=st.integers(3, 40), seed=st.integers(0, 5))
@example(weight=0.1, number=3, seed=0)
@example(weight=1.1, number=30, seed=0)
def test_everything_has_its_turn(weight: float, number: int, seed: int) -> None:
    """After any number of epochs no example has been met more than once more often than another."""
    plan = made([1.0] * number, Bounds(4), epochs=None, steps=1, weights=[weight] * number, seed=seed)
    seen = Counter(dict.fromkeys(range(number), 0))
    for done in range(1, 15):
        batches = plan._epoch(done - 1)
        assert abs(sum(len(batch) for batch in batches) - weight * number) <= 1 + 1e-6
        seen.update(index for batch in batches for index in batch)
        assert math.floor(done * weight) <= min(seen.values())
        assert max(seen.values()) <= math.ceil(done * weight)


def test_an_example_met_twice_in_an_epoch_counts_twice_in_the_bounds() -> None:
    plan = made([10.0] * 6, Bounds(8, budget=30), weights=[2.0] * 6)
    assert all(len(batch.indices) <= 3 for batch in plan.batches())
    assert Counter(examples(list(plan.batches()))) == dict.fromkeys(range(6), 2)


def test_epochs_without_any_example_are_passed_over() -> None:
    """Of 3 examples with a weight of 0.1 most epochs hold none; the steps asked for are still made."""
    plan = made([1.0] * 3, Bounds(1), epochs=None, steps=6, weights=[0.1] * 3)
    batches = list(plan.batches())
    assert Counter(examples(batches)) == dict.fromkeys(range(3), 2)
    assert [batch.number for batch in batches] == list(range(6))
    assert plan.fraction(6) <= 20


def test_a_training_without_any_example_is_refused() -> None:
    for seed in range(3):
        with pytest.raises(DataError, match="no example has its turn"):
            made([1.0] * 3, Bounds(1), epochs=1, weights=[1e-3] * 3, seed=seed)


# ------------------------------------------------------------------------------------------------ size


def test_many_examples_on_many_ranks() -> None:
    costs = np.random.default_rng(0).integers(1, 3000, 200_000) / 100
    plan = Plan(costs, Bounds(64, budget=960.0, bucket_batches=100), seed=0, ranks=8, per_step=32, epochs=1)
    assert 200_000 / 64 <= plan.total < 200_000 / 20
    near_the_end = plan.total // 32 * 32 - 32
    numbers = [batch.number for batch in islice(plan.batches(near_the_end, 3), 4)]
    assert numbers == [near_the_end + 3 + 8 * turn for turn in range(4)]


# ------------------------------------------------------------------------------------------------ groups


@quick
@given(costs=COSTS, bounds=BOUNDS, seed=st.integers(0, 9), groups=st.integers(1, 4))
def test_groups_never_share_a_batch_and_nothing_is_lost(
    costs: list[float], bounds: Bounds, seed: int, groups: int
) -> None:
    group = [at * 7 % groups for at in range(len(costs))]
    plan = made(costs, bounds, seed=seed, groups=group)
    batches = list(plan.batches())
    assert sorted(examples(batches)) == list(range(len(costs)))
    assert all(len({group[index] for index in batch.indices}) == 1 for batch in batches)


@quick
@given(costs=COSTS, bounds=BOUNDS, seed=st.integers(0, 9))
def test_one_group_is_as_if_there_were_none(costs: list[float], bounds: Bounds, seed: int) -> None:
    alone = made(costs, bounds, seed=seed)
    grouped = made(costs, bounds, seed=seed, groups=[5] * len(costs))
    assert list(alone.batches()) == list(grouped.batches())


def test_batches_of_groups_are_mixed() -> None:
    """64 batches of two groups: not all of one group before the other."""
    plan = made([1.0] * 128, Bounds(2, bucket_batches=0), groups=[at % 2 for at in range(128)])
    order = [batch.indices[0] % 2 for batch in plan.batches()]
    assert sum(a != b for a, b in pairwise(order)) > 8
