"""All rewards of a recipe together."""

from __future__ import annotations

from collections.abc import Sequence

from .answer import Answer, Scorer, Scores, combine, each, earned
from .config import (
    Code,
    Cosine,
    Earned,
    Exact,
    Format,
    Function,
    Http,
    Json,
    Model,
    Number,
    Overlong,
    Regex,
    Repetition,
    RewardSection,
)


class Rewards:
    """Scores answers by several rewards with weights.

    Args:
        sections: of the recipe.

    Raises:
        LuthierError: a reward that can't be used: a function that is not there, a package that is missing, a model that
            can't be loaded.
    """

    def __init__(self, sections: Sequence[RewardSection]):
        self._named = [(section.label, section.weight, _scorer(section)) for section in sections]
        self.names: Sequence[str] = [name for name, _, _ in self._named]

    def score(self, answers: Sequence[Answer]) -> Scores:
        """The weighted sum for each answer, and each reward alone. An error, a time-out, a None or a number that is not
        finite makes the total of that one answer NaN, and is told with its reason; no other answer is touched."""
        return combine(self._named, answers)


def _scorer(section: RewardSection) -> Scorer:
    """The reward of a section; what needs other libraries is imported with it."""
    from . import length, matching

    match section:
        case Exact():
            return matching.exact(section)
        case Number():
            return matching.number(section)
        case Regex():
            return matching.regex(section)
        case Format():
            return matching.form(section)
        case Json():
            return matching.json(section)
        case Overlong():
            return length.overlong(section)
        case Repetition():
            return length.repetition(section)
        case Cosine():
            return length.shaped(section, _scorer(section.correct))
        case Earned():
            return each(earned)
        case Function():
            from .functions import function

            return function(section)
        case Code():
            from .code import code

            return code(section)
        case Model():
            from .reward_model import model

            return model(section)
        case Http():
            from .http import http

            return http(section)
    raise AssertionError(section.kind)
