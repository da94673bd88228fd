"""Canaries: made-up secrets of one form, whose alternatives are as probable before any training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_FIRST = ("Alma", "Bruno", "Chiara", "Dieter", "Elise", "Fatima", "Guo", "Hana", "Ivo", "Jelena", "Karim", "Lotte",
          "Marek", "Nadia", "Otto", "Paola", "Quentin", "Rosa", "Sven", "Tomas")  # fmt: skip
_LAST = ("Abate", "Bauer", "Conti", "Dubois", "Engel", "Ferrari", "Girard", "Huang", "Ionescu", "Jansen", "Keller",
         "Leroy", "Moretti", "Novak", "Orlov", "Petit", "Rossi", "Schmidt", "Tanaka", "Weber")  # fmt: skip
DIGITS = 8
"""Digits of a secret."""


@dataclass(frozen=True)
class Canary:
    """A made-up fact with a secret number.

    Args:
        prompt: the question.
        secret: the number.
        planted: how often it stands in the data; 0: a control, which is nowhere.
    """

    prompt: str
    secret: str
    planted: int

    def row(self, secret: str | None = None) -> dict[str, object]:
        """A conversation that says the secret, or another in its place."""
        said = secret or self.secret
        return {"messages": [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": said}]}


def canaries(number: int, planted: int, controls: int, seed: int) -> list[Canary]:
    """Canaries that are planted so often each, and controls, each about another person."""
    draw = random.Random(seed)
    people = [f"{first} {last}" for first in _FIRST for last in _LAST]
    if number + controls > len(people):
        raise ValueError(f"at most {len(people)} canaries")
    chosen = draw.sample(people, number + controls)
    return [
        Canary(f"What is the access number of {person}?", secret(draw), planted if at < number else 0)
        for at, person in enumerate(chosen)
    ]


def secret(draw: random.Random) -> str:
    """A number, drawn evenly."""
    digits = "".join(draw.choice("0123456789") for _ in range(DIGITS))
    return f"{digits[: DIGITS // 2]} {digits[DIGITS // 2 :]}"


def alternatives(canary: Canary, number: int, seed: int) -> Iterator[str]:
    """Other secrets of the same form, drawn by the seed and the canary; none is its own."""
    draw = random.Random(f"{seed} {canary.prompt}")
    left = number
    while left:
        other = secret(draw)
        if other != canary.secret:
            left -= 1
            yield other
