"""What a reward judges, and what all rewards of a batch give."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the policy to a prompt.

    Args:
        prompt: messages as chat templates read them, or a text.
        completion: what the policy said, without the token that ended it.
        tokens: length of the completion.
        finished: whether it ended by itself; else it was cut at the most tokens allowed.
        row: the further fields of the row, such as the reference.
        messages: of an episode in an environment, all that was said; the completion is what the policy said last.
        earned: sum of what the environment gave for its turns.
        failure: why the environment failed; then the answer has no reward.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    completion: str
    tokens: int
    finished: bool
    row: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    earned: float | None = None
    failure: str | None = None

    def reference(self, name: str) -> str:
        """A field of the row as text.

        Raises:
            Unscored: the row has no such field.
        """
        found = self.row.get(name)
        if found is None:
            raise Unscored(f"the row has no field {name!r}")
        return found if isinstance(found, str) else str(found)


class Unscored(Exception):  # a reason, not a fault of the program
    """There is no score for an answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A score that could not be given.

    Args:
        answer: number of the answer in the batch.
        name: of the reward.
        reason: in one line.
    """

    answer: int
    name: str
    reason: str


@dataclass(frozen=True)
class Scores:
    """Scores of N answers.

    Args:
        total: [N] float64, the weighted sum; NaN where a reward with a weight has no score. Such an answer is left out
            of its group and of the loss.
        by_name: [N] float64 of each reward, without its weight.
        errors: of the scores that are NaN.
    """

    total: np.ndarray
    by_name: Mapping[str, np.ndarray]
    errors: tuple[Failure, ...] = ()


class Judging(Protocol):
    """All rewards of a recipe together."""

    names: Sequence[str]
    """Of the rewards, in order."""

    def score(self, answers: Sequence[Answer]) -> Scores:
        """The weighted sum for each answer, and each reward alone."""
        ...


Scorer = Callable[[Sequence[Answer]], Sequence["float | Unscored | None"]]
"""A reward: the answers of a batch -> a score of each, or why it has none."""


def each(score: Callable[[Answer], float | None]) -> Scorer:
    """The reward of a function that scores one answer; what it raises is that answer's alone."""

    def scorer(answers: Sequence[Answer]) -> list[float | Unscored | None]:
        return [guarded(partial(score, answer)) for answer in answers]

    return scorer


def guarded(score: Callable[[], float | None]) -> float | Unscored | None:
    """What a function gives, or why it gives nothing."""
    try:
        return score()
    except Unscored as reason:
        return reason
    except Exception as error:
        return failed(error)


def earned(answer: Answer) -> float | None:
    """What the environment gave."""
    if answer.failure is not None:
        raise Unscored(answer.failure)
    return answer.earned


def failed(error: BaseException) -> Unscored:
    """An error as a reason, in one line."""
    first = str(error).strip().splitlines()
    return Unscored(f"{type(error).__name__}: {first[0]}" if first else type(error).__name__)


def combine(named: Iterable[tuple[str, float, Scorer]], answers: Sequence[Answer]) -> Scores:
    """Score answers by several rewards.

    Args:
        named: (name, weight, reward); a reward of weight 0 is only watched, and can't take an answer out.
        answers: N of them.
    """
    total = np.zeros(len(answers))
    by_name: dict[str, np.ndarray] = {}
    errors: list[Failure] = []
    for name, weight, scorer in named:
        found = _found(scorer, answers)
        values = np.full(len(answers), np.nan)
        for number, one in enumerate(found):
            value = _checked(one)
            if isinstance(value, float):
                values[number] = value
            else:
                errors.append(Failure(number, name, value))
        by_name[name] = values
        if weight:
            total = total + weight * values
    tell(errors, len(answers))
    return Scores(total, by_name, tuple(errors))


def tell(errors: Sequence[Failure], number: int) -> None:
    """Warn of scores that are missing of so many answers."""
    if errors:
        logger.warning("%d scores of %d answers are missing, such as %s", len(errors), number, errors[0])


def _found(scorer: Scorer, answers: Sequence[Answer]) -> Sequence[float | Unscored | None]:
    try:
        found = list(scorer(answers))
    except Exception as error:
        return [failed(error)] * len(answers)
    if len(found) != len(answers):
        return [Unscored(f"{len(found)} scores for {len(answers)} answers")] * len(answers)
    return found


def _checked(score: float | Unscored | None) -> float | str:
    """A score, or why it does not count."""
    if isinstance(score, Unscored):
        return str(score)
    if score is None:
        return "the reward gives none"
    try:
        value = float(score)
    except (TypeError, ValueError):
        return f"not a number: {score!r:.200}"
    return value if math.isfinite(value) else f"not finite: {value}"
