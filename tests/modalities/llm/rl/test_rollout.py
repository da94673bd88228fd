"""Completions drawn anew while they teach nothing, and the rewards of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from luthier.common.errors import LuthierError
from luthier.modalities.llm.rl.actors import Trajectory
from luthier.modalities.llm.rl.prompts import Asked
from luthier.modalities.llm.rl.rewards.answer import Answer, Scores
from luthier.modalities.llm.rl.rollout import Drawer, samples_of


class Actor:
    """Prompt n is said the same thing to until it is asked for the n-th time."""

    def __init__(self, version: int = 3, failure: str | None = None):
        self.calls: list[list[int]] = []
        self.seeds: list[int] = []
        self.version, self.failure = version, failure

    def act(self, prompts: Sequence[Asked], seeds: Sequence[Sequence[int]]) -> list[list[Trajectory]]:
        self.calls.append([int(one.ids[0]) for one in prompts])
        self.seeds += [one for of in seeds for one in of]
        return [
            [self.said(asked, number if int(asked.ids[0]) < len(self.calls) else 0) for number in range(len(of))]
            for asked, of in zip(prompts, seeds, strict=True)
        ]

    def said(self, asked: Asked, value: int) -> Trajectory:
        tokens = np.arange(1, 2 + value, dtype=np.int32)
        failure = self.failure if value == 1 else None
        answer = Answer("", str(value), len(tokens), True, asked.row, failure=failure)
        trained = np.ones(len(tokens), dtype=bool)
        return Trajectory(asked.ids, tokens, trained, -trained.astype(np.float32), (self.version,), str(value), answer)


class Value:
    names = ("value",)

    def score(self, answers: Sequence[Answer]) -> Scores:
        values = np.array([float(one.completion) for one in answers])
        return Scores(values, {"value": values})


def prompts(*numbers: int) -> list[Asked]:
    return [Asked(np.array([number], np.int32), "", {}, "rows:1") for number in numbers]


def drawer(actor: Any, **options: Any) -> Drawer:
    return Drawer(actor, Value(), 3, **options)  # type: ignore[arg-type]


def test_prompts_whose_completions_are_worth_the_same_are_asked_again_within_bounds() -> None:
    actor = Actor()
    keys = [(7, number) for number in range(4)]
    found = drawer(actor, resample=2).draw(prompts(0, 1, 2, 9), keys, 3)
    assert actor.calls == [[0, 1, 2, 9], [1, 2, 9], [2, 9]]
    assert [one.attempt for one in found] == [0, 1, 2, 2]
    assert [one.rewards.tolist() for one in found] == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 0, 0]]
    assert len(set(actor.seeds)) == len(actor.seeds), "never with the same draws"


def test_without_resampling_each_prompt_is_asked_once() -> None:
    actor = Actor()
    drawer(actor).draw(prompts(0, 9), [(1,), (2,)], 3)
    assert actor.calls == [[0, 9]]


def test_other_weights_are_never_trained_on() -> None:
    with pytest.raises(LuthierError, match="other weights"):
        drawer(Actor(version=2)).draw(prompts(0), [(1,)], 3)


def test_a_failed_environment_takes_out_its_completion_whatever_judges_it() -> None:
    (found,) = drawer(Actor(failure="the tool is away")).draw(prompts(0), [(1,)], 3)
    assert np.isnan(found.rewards).tolist() == [False, True, False]
    assert found.errors == {1: "environment: the tool is away"}


def test_completions_after_different_prompts_keep_their_own() -> None:
    """An environment may begin otherwise each time; what is the same stands once."""
    (found,) = drawer(Actor()).draw(prompts(0), [(1,)], 3)
    other = np.array([8, 9], np.int32)
    found.completions[2] = replace(found.completions[2], prompt=other)
    made = samples_of([found])
    assert made.groups.tolist() == [2, 1]
    assert made.prompts.tolist() == [0, 8, 9]
    assert made.prompt_lengths.tolist() == [1, 2]
    made.used[:] = True
    data = made.joined()
    assert data["input_ids"].tolist() == [0, 1, 1, 2, 8, 9, 1, 2, 3]
    assert data["labels"].tolist() == [1, 1, 2, 1, 2, 3]
    assert data["old"] is None
    torch.testing.assert_close(data["engine"], -torch.ones(6))
