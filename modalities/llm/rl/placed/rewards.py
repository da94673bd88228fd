"""Rewards in processes that Ray has placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ..rewards.answer import Answer, Scores, tell
from ..rewards.rewards import Rewards
from .section import PlacementSection
from .workers import Workers


class RewardWorker:
    """An actor: the rewards of a recipe.

    Args:
        sections: of the recipe.
        threads: torch's threads, as many as the trainer has.
    """

    def __init__(self, sections: Sequence[Any], threads: int):
        self._sections, self._threads = sections, threads

    def ready(self) -> None:
        """Load what the rewards need."""
        torch.set_num_threads(self._threads)
        self._rewards = Rewards(self._sections)

    def score(self, answers: Sequence[Answer]) -> Scores:
        """See `Rewards.score`."""
        return self._rewards.score(answers)


class PlacedRewards:
    """Scores answers by workers that Ray has placed; a part of the answers by each, those of a prompt together.

    Args:
        sections: of the recipe.
        placement: with `rewards`.
    """

    def __init__(self, sections: Sequence[Any], placement: PlacementSection):
        assert placement.rewards is not None
        self.names: Sequence[str] = [one.label for one in sections]
        given = (tuple(sections), torch.get_num_threads())
        self._workers = Workers(RewardWorker, given, "rewards", placement.rewards, placement)

    def score(self, answers: Sequence[Answer]) -> Scores:
        """See `Rewards.score`.

        Raises:
            LuthierError: a worker could not be placed, was lost too often, or can't use a reward.
        """
        shares = shared(answers, self._workers.number)
        found = self._workers.map([partial(_asked, share) for share in shares])
        return joined(found, [len(share) for share in shares], self.names)


def shared(answers: Sequence[Answer], number: int) -> list[list[Answer]]:
    """At most so many parts of about the same size, in order; the answers to one row stay together."""
    groups = [list(own) for _, own in groupby(answers, key=lambda one: id(one.row))]
    shares: list[list[Answer]] = []
    for done, group in zip(np.cumsum([0, *map(len, groups)]), groups, strict=False):
        if not shares or done * number >= len(answers) * len(shares):
            shares.append([])
        shares[-1] += group
    return shares


def joined(scores: Sequence[Scores], lengths: Sequence[int], names: Sequence[str]) -> Scores:
    """The scores of parts as those of the whole."""
    nothing = np.zeros(0)
    begins = np.cumsum([0, *lengths]).tolist()
    errors = tuple(
        replace(one, answer=one.answer + begin)
        for begin, part in zip(begins, scores, strict=False)
        for one in part.errors
    )
    tell(errors, begins[-1])
    return Scores(
        np.concatenate([one.total for one in scores] or [nothing]),
        {name: np.concatenate([one.by_name[name] for one in scores] or [nothing]) for name in names},
        errors,
    )


def _asked(answers: list[Answer], actor: Any) -> Any:
    return actor.score.remote(answers)
