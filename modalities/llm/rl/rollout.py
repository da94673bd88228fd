"""A rollout: what the policy does after prompts, what that is worth, and what is trained on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from ....common.errors import LuthierError
from .actors import Actor, Trajectory
from .advantages import is_flat
from .prompts import Asked
from .rewards.answer import Judging, Scores
from .samples import Samples
from .seeds import seed


@dataclass
class Drawn:
    """A prompt with its G completions.

    Args:
        asked: the prompt.
        completions: of it.
        rewards: [G] float64, NaN where there is none.
        by_name: [G] of each reward.
        errors: why a completion has no reward, by its number.
        attempt: how often the prompt was completed before, as all completions were worth the same.
    """

    asked: Asked
    completions: list[Trajectory]
    rewards: np.ndarray
    by_name: dict[str, np.ndarray]
    errors: dict[int, str] = field(default_factory=dict)
    attempt: int = 0


@dataclass
class Clock:
    """Seconds spent on drawing completions and on rewarding them."""

    drawing: float = 0.0
    rewarding: float = 0.0


class Drawer:
    """Draws completions and judges them.

    Args:
        actor: draws.
        rewards: judge.
        number: completions of a prompt G.
        resample: how often a prompt is completed anew while its completions are all worth the same.
    """

    def __init__(self, actor: Actor, rewards: Judging, number: int, resample: int = 0):
        self.actor, self.rewards, self.number, self.resample = actor, rewards, number, resample
        self.clock = Clock()

    def draw(self, prompts: Sequence[Asked], keys: Sequence[Sequence[int]], version: int) -> list[Drawn]:
        """Completions of prompts, in their order.

        Args:
            prompts: to be completed.
            keys: of each prompt: its completions are a function of the weights, the prompt and this.
            version: of the weights that they have to be drawn with.

        Raises:
            LuthierError: the engine has other weights.
        """
        found = self._once(prompts, keys, version, 0)
        for attempt in range(1, self.resample + 1):
            flat = [at for at, one in enumerate(found) if bool(is_flat(one.rewards[None])[0])]
            if not flat:
                break
            again = self._once([prompts[at] for at in flat], [keys[at] for at in flat], version, attempt)
            for at, one in zip(flat, again, strict=True):
                found[at] = one
        return found

    def _once(self, prompts: Sequence[Asked], keys: Sequence[Sequence[int]], version: int, attempt: int) -> list[Drawn]:
        began = time.monotonic()
        made = self.actor.act(prompts, [[seed(*key, attempt, number) for number in range(self.number)] for key in keys])
        every = [one for group in made for one in group]
        other = {number for one in every for number in one.versions} - {version}
        if other:
            raise LuthierError(
                "the engine answered with other weights than it was given", given=sorted(other), expected=version
            )
        drawn = time.monotonic()
        scores = self.rewards.score([one.answer for one in every])
        self.clock.drawing += drawn - began
        self.clock.rewarding += time.monotonic() - drawn
        return [
            self._drawn(asked, group, scores, at * self.number, attempt)
            for at, (asked, group) in enumerate(zip(prompts, made, strict=True))
        ]

    def _drawn(self, asked: Asked, group: list[Trajectory], scores: Scores, begin: int, attempt: int) -> Drawn:
        own = slice(begin, begin + self.number)
        errors: dict[int, str] = {}
        for one in scores.errors:
            if begin <= one.answer < begin + self.number:
                before = errors.get(one.answer - begin)
                told = f"{one.name}: {one.reason}"
                errors[one.answer - begin] = told if before is None else f"{before}; {told}"
        by_name = {name: values[own] for name, values in scores.by_name.items()}
        total = scores.total[own].copy()
        for number, made in enumerate(group):
            if made.answer.failure is not None:  # whatever else judges it
                total[number] = np.nan
                errors.setdefault(number, f"environment: {made.answer.failure}")
        return Drawn(asked, group, total, by_name, errors, attempt)


def samples_of(drawn: Sequence[Drawn]) -> Samples:
    """The tokens of completions, before it is known what each is trained for."""
    every = [one for group in drawn for one in group.completions]
    runs = [
        [one.prompt for one in same]
        for group in drawn
        for _, same in groupby(group.completions, key=lambda one: one.prompt.tobytes())
    ]
    lengths = torch.tensor([len(one.tokens) for one in every])
    number, tokens = len(every), int(lengths.sum())
    return Samples(
        torch.from_numpy(np.concatenate([run[0] for run in runs]).astype(np.int32)),
        torch.tensor([len(run[0]) for run in runs]),
        torch.tensor([len(run) for run in runs]),
        lengths,
        torch.from_numpy(np.concatenate([one.tokens for one in every]).astype(np.int32)),
        torch.from_numpy(np.concatenate([one.trained for one in every])),
        torch.from_numpy(np.concatenate([one.log_probs for one in every]).astype(np.float32)),
        torch.zeros(tokens),
        torch.zeros(number, dtype=torch.bool),
        torch.zeros(number, dtype=torch.bool),
        *(torch.full((tokens,), torch.nan) for _ in range(4)),
    )
