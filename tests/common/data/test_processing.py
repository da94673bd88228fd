"""Batches as data workers make them: the same whoever makes them, and bad examples told, not hidden."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from luthier.common.data.plan import Bounds, Plan, Planned
from luthier.common.data.processing import Batch, PlannedData, PlanSampler, Processing, Shown, loader
from luthier.common.errors import BadExample, DataError, LuthierError, RecipeError
from luthier.common.recipe import Source


class Numbers(Processing[float]):
    """An example is its own cost; a negative one can't be encoded. Random noise shows which generator made it."""

    unit = "things"

    def read(self, source: Source) -> Iterator[float]:
        raise NotImplementedError

    def examine(self, example: float, training: bool) -> list[float]:
        return [example]

    def cost(self, example: float) -> float:
        return abs(example)

    def encode(self, example: float, generator: np.random.Generator | None) -> tuple[float, float]:
        if example < 0:
            raise BadExample("negative", "is below zero", where="numbers:7", given=example)
        return example, float(generator.random()) if generator else 0.0

    def collate(self, encoded: Sequence[Any], generator: np.random.Generator | None) -> dict[str, Any]:
        noise = float(generator.random()) if generator else 0.0
        return {"values": torch.tensor(encoded, dtype=torch.float64), "noise": noise, "inner": {"x": torch.ones(1)}}

    def show(self, data: Any, row: int) -> Shown:
        return Shown("", {}, [])


def batches(examples: list[float], workers: int = 0, start: int = 0, **options: Any) -> list[Batch]:
    options = {"seed": 3, **options}
    plan = Plan([abs(example) for example in examples], Bounds(3), seed=1, epochs=2)
    sampler = PlanSampler(plan)
    sampler.start = start
    return list(loader(PlannedData(Numbers(), examples, **options), sampler, workers))


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        a.number == b.number
        and a.indices == b.indices
        and torch.equal(a.data["values"], b.data["values"])
        and a.data["noise"] == b.data["noise"]
        for a, b in zip(first, second, strict=True)
    )


def test_random_changes_depend_on_the_place_and_not_on_the_worker() -> None:
    examples = [float(number) for number in range(1, 11)]
    alone = batches(examples)
    assert same(alone, batches(examples, workers=2))
    assert same(alone[3:], batches(examples, start=3))
    assert same(alone[3:], batches(examples, workers=2, start=3))
    assert not same(alone, batches(examples, seed=4))


def test_every_example_has_its_own_noise_in_every_epoch() -> None:
    found = batches([float(number) for number in range(1, 11)])
    noise = [float(row[1]) for batch in found for row in batch.data["values"]]
    assert len(set(noise)) == len(noise) == 20
    assert len({batch.data["noise"] for batch in found}) == len(found)


def test_without_a_seed_nothing_is_random() -> None:
    found = batches([1.0, 2.0, 3.0], seed=None)
    assert {float(row[1]) for batch in found for row in batch.data["values"]} == {0.0}


def test_costs_of_a_batch() -> None:
    data = PlannedData(Numbers(), [2.0, 5.0, 1.0], 0)
    batch = data[Planned(4, 1, (0, 1, 2))]
    assert (batch.number, batch.epoch, batch.indices, batch.real, batch.padded) == (4, 1, (0, 1, 2), 8.0, 15.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_example_that_cannot_be_encoded_is_left_out_and_told(workers: int) -> None:
    found = batches([1.0, -2.0, 3.0, 4.0, -5.0], workers=workers)
    bad = [error for batch in found for error in batch.bad]
    assert len(bad) == 4  # two of them in two epochs
    assert {error.reason for error in bad} == {"negative"}
    assert all("numbers:7: is below zero" in str(error) for error in bad)
    assert sorted(index for batch in found for index in batch.indices) == [0, 0, 2, 2, 3, 3]
    assert all(len(batch.data["values"]) == len(batch.indices) for batch in found if batch.indices)


def test_a_batch_of_bad_examples_only_is_empty() -> None:
    batch = PlannedData(Numbers(), [-1.0, -2.0], 0)[Planned(0, 0, (0, 1))]
    assert (batch.data, batch.indices, batch.real, batch.padded, len(batch.bad)) == (None, (), 0, 0, 2)
    batch.to(torch.device("cpu"))


@pytest.mark.parametrize("indices", [(), (0,)], ids=["none", "bad"])
def test_a_batch_without_examples_has_a_stand_in_that_counts_for_nothing(indices: tuple[int, ...]) -> None:
    """As the plan fills up the last step where there are fewer examples than ranks, or where none can be encoded: a
    sharded model has to be run by all ranks."""
    batch = PlannedData(Numbers(), [-1.0, 1.0, 2.0], 0)[Planned(5, 2, indices)]
    assert (batch.number, batch.epoch, batch.indices, len(batch.bad)) == (5, 2, (), len(indices))
    assert (batch.real, batch.padded) == (0, 0)
    assert batch.data["values"][:, 0].tolist() == [1.0]


def test_an_evaluation_has_no_stand_in() -> None:
    assert PlannedData(Numbers(), [1.0], None)[Planned(5, 2, ())].data is None


@pytest.mark.parametrize(
    "error",
    [
        LuthierError("wrong", where="a", given=1, do="b"),
        RecipeError("wrong", where="a"),
        DataError("wrong"),
        BadExample("noisy", "wrong", where="a:1", given=2, expected=3),
    ],
)
def test_errors_travel_between_processes(error: LuthierError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)


def test_a_batch_moves_with_all_its_tensors() -> None:
    moved = PlannedData(Numbers(), [1.0], 0)[Planned(0, 0, (0,))].to(torch.device("meta"))
    assert moved.data["values"].device.type == moved.data["inner"]["x"].device.type == "meta"
