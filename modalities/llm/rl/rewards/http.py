"""The reward of a remote scorer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from typing import Any

from ..web import Client, ServerError
from .answer import Answer, Scorer, Unscored
from .config import Http

EPISODE = ("messages", "earned", "failure")


def http(section: Http) -> Scorer:
    """See `config.Http`."""
    client = Client(section.url, section.timeout, section.retries, token_variable=section.token_variable)

    def ask(answers: Sequence[Answer]) -> list[float | Unscored | None]:
        try:
            found: Any = client.post("", {"answers": [_told(one) for one in answers]})
        except ServerError as error:
            return [Unscored(" ".join(str(error).split()))] * len(answers)
        except (TypeError, ValueError) as error:
            return [Unscored(f"the row can't be sent as JSON: {error}")] * len(answers)
        scores = found.get("scores") if isinstance(found, dict) else None
        if not isinstance(scores, list) or len(scores) != len(answers):
            return [Unscored(f"{section.url} does not give {len(answers)} scores: {found!r:.200}")] * len(answers)
        return [_number(one) for one in scores]

    def scorer(answers: Sequence[Answer]) -> list[float | Unscored | None]:
        parts = [answers[at : at + section.batch] for at in range(0, len(answers), section.batch)]
        with ThreadPoolExecutor(section.workers, "scorer") as pool:
            return list(chain.from_iterable(pool.map(ask, parts)))

    return scorer


def _told(answer: Answer) -> dict[str, Any]:
    """An answer as JSON; what only environments have is left out without one."""
    return {name: value for name, value in asdict(answer).items() if name not in EPISODE or value not in (None, (), [])}


def _number(score: Any) -> float | Unscored | None:
    if score is None:
        return Unscored("the scorer gives none")
    if isinstance(score, bool | int | float):
        return float(score)
    return Unscored(f"not a number: {score!r:.200}")
