"""Examples put into few batches by best fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.common.data.packing import pack
from luthier.common.data.plan import Bounds, Plan, cut
from luthier.common.errors import DataError


def simple_pack(lengths: list[int], capacity: int) -> list[int]:
    """Best fit decreasing by looking at every row: the room left in each."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40), capacity=st.integers(40, 100), scale=st.sampled_from([1, 100])
)
def test_packing_is_best_fit_decreasing(lengths, capacity, scale) -> None:
    lengths, capacity = [scale * length for length in lengths], scale * capacity
    rows = pack(lengths, capacity)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert sorted(capacity - length for length in filled) == simple_pack(lengths, capacity)
    assert rows == pack(np.array(lengths, dtype=np.int64), capacity)


def test_rooms_far_apart() -> None:
    """Of 3000 and 5500 tokens left, 1000 more go to the 3000; the next 2500 to the 5500. Of equal rooms, the row that
    came to it last is filled."""
    assert pack([7000, 4500, 1000, 2500], 10_000) == [(0, 3), (1, 2)]
    assert pack([7000, 4500, 1000], 10_000) == [(0, 2), (1,)]
    assert pack([9000, 4000, 1000, 5000], 10_000) == [(0,), (3, 1, 2)]


def test_packing_by_hand() -> None:
    assert pack([3, 7, 5, 5], 10) == [(1, 0), (2, 3)]
    assert pack([], 10) == []


@pytest.mark.parametrize(("lengths", "given"), [([3, 11], "11 tokens"), ([3, 0], "0 tokens")])
def test_what_can_t_be_packed(lengths, given) -> None:
    with pytest.raises(DataError, match="document 1") as error:
        pack(lengths, 10)
    assert given in str(error.value)


def test_many_documents_are_packed_well() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 20_000)
    rows = pack(lengths, 4096)
    assert len(rows) <= 1.01 * lengths.sum() / 4096 + 1


def test_an_order_with_repeats() -> None:
    """Packing an order holds each example as often as the order does, and another order gives other rows."""
    costs = np.array([3.0, 3.0, 3.0, 3.0, 4.0])
    bounds = Bounds(1, budget=7, joined=True, packed=True)
    order = [4, 2, 0, 1, 3, 2]
    found = cut(order, costs, bounds)
    assert sorted(number for row in found for number in row) == sorted(order)
    assert found[0] == (4, 2)
    assert cut([4, 3, 0, 1, 2, 2], costs, bounds)[0] == (4, 3)


def test_a_packed_plan_holds_each_example_once_an_epoch_and_goes_on_anywhere() -> None:
    costs = np.random.default_rng(0).integers(1, 50, 300).astype(float)
    bounds = Bounds(1, budget=64, joined=True, packed=True)
    plan = Plan(costs, bounds, seed=1, ranks=2, per_step=4, epochs=3)
    batches = [list(plan.batches(rank=rank)) for rank in range(2)]
    whole = sorted((batch for part in batches for batch in part), key=lambda batch: batch.number)
    for epoch in range(3):
        seen = [index for batch in whole if batch.epoch == epoch for index in batch.indices]
        assert sorted(seen) == list(range(300))
    assert all(costs[list(batch.indices)].sum() <= 64 for batch in whole)
    fewest = costs.sum() / 64
    assert len(whole) <= 3 * (1.1 * fewest + 2)
    assert {batch.indices for batch in whole if batch.epoch == 0} != {b.indices for b in whole if b.epoch == 1}
    again = Plan(costs, bounds, seed=1, ranks=1, per_step=4, epochs=3)
    assert list(again.batches(start=20)) == whole[20:]
