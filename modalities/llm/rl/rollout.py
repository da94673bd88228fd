"""A rollout: completions of prompts, what they are worth, and what is trained on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ....common.errors import LuthierError
from .advantages import is_flat
from .engines.engine import Completion, Engine, Sampling
from .prompts import Asked
from .rewards.answer import Answer, Scores
from .rewards.rewards import Rewards
from .samples import Samples


@dataclass
class Drawn:
    """A prompt with its G completions.

    Args:
        asked: the prompt.
        completions: of it.
        texts: what they say, without the token that ended it.
        rewards: [G] float64, NaN where there is none.
        by_name: [G] of each reward.
        errors: why a completion has no reward, by its number.
        attempt: how often the prompt was completed before, as all completions were worth the same.
    """

    asked: Asked
    completions: list[Completion]
    texts: list[str]
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
        engine: draws.
        rewards: judge.
        tokenizer: makes texts of tokens.
        sampling: how tokens are drawn.
        number: completions of a prompt G.
        resample: how often a prompt is completed anew while its completions are all worth the same.
    """

    def __init__(
        self, engine: Engine, rewards: Rewards, tokenizer: object, sampling: Sampling, number: int, resample: int = 0
    ):
        self.engine, self.rewards, self.tokenizer = engine, rewards, tokenizer
        self.sampling, self.number, self.resample = sampling, number, resample
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
        seeds = [[seed(*key, attempt, number) for number in range(self.number)] for key in keys]
        made = self.engine.generate([one.ids for one in prompts], self.sampling, seeds)
        other = {one.version for group in made for one in group} - {version}
        if other:
            raise LuthierError(
                "the engine answered with other weights than it was given", given=sorted(other), expected=version
            )
        texts = [[self._text(one) for one in group] for group in made]
        drawn = time.monotonic()
        answers = [
            Answer(asked.prompt, text, len(one.tokens), one.finished, asked.row)
            for asked, group, said in zip(prompts, made, texts, strict=True)
            for one, text in zip(group, said, strict=True)
        ]
        scores = self.rewards.score(answers)
        self.clock.drawing += drawn - began
        self.clock.rewarding += time.monotonic() - drawn
        return [
            self._drawn(asked, group, said, scores, at * self.number, attempt)
            for at, (asked, group, said) in enumerate(zip(prompts, made, texts, strict=True))
        ]

    def _text(self, one: Completion) -> str:
        ids = one.tokens[:-1] if one.finished else one.tokens
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))  # type: ignore[attr-defined]

    def _drawn(
        self, asked: Asked, group: list[Completion], texts: list[str], scores: Scores, begin: int, attempt: int
    ) -> Drawn:
        own = slice(begin, begin + self.number)
        errors: dict[int, str] = {}
        for one in scores.errors:
            if begin <= one.answer < begin + self.number:
                before = errors.get(one.answer - begin)
                told = f"{one.name}: {one.reason}"
                errors[one.answer - begin] = told if before is None else f"{before}; {told}"
        by_name = {name: values[own] for name, values in scores.by_name.items()}
        return Drawn(asked, group, texts, scores.total[own], by_name, errors, attempt)


def seed(*key: int) -> int:
    """A seed of 63 bits, unrelated to those of other keys."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def samples_of(drawn: Sequence[Drawn]) -> Samples:
    """The tokens of completions, before it is known what each is trained for."""
    every = [one for group in drawn for one in group.completions]
    lengths = torch.tensor([len(one.tokens) for one in every])
    number, tokens = len(every), int(lengths.sum())
    unknown = torch.full((tokens,), torch.nan)
    return Samples(
        torch.tensor([len(group.completions) for group in drawn]),
        lengths,
        torch.from_numpy(np.concatenate([one.tokens for one in every]).astype(np.int32)),
        torch.ones(tokens, dtype=torch.bool),
        torch.from_numpy(np.concatenate([one.log_probs for one in every]).astype(np.float32)),
        torch.zeros(tokens),
        torch.zeros(number, dtype=torch.bool),
        torch.zeros(number, dtype=torch.bool),
        unknown,
        unknown.clone(),
    )
