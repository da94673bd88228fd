"""Rewards that are the user's own functions."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...scoring import load_function
from .answer import Answer, Scorer, Unscored, failed
from .config import Function


def function(section: Function) -> Scorer:
    """See `config.Function`.

    Raises:
        RecipeError: there is no such function.
    """
    score = load_function(section.function, "rewards.function")

    def call(answers: Sequence[Answer]) -> list[Any]:
        found = _call(score, answers, dict(section.parameters), section.timeout)
        if len(found) != len(answers):
            raise ValueError(f"{len(found)} scores for {len(answers)} answers")
        return found

    def scorer(answers: Sequence[Answer]) -> list[float | Unscored | None]:
        try:
            return call(answers)
        except TimeoutError:
            return [Unscored(f"took longer than {section.timeout} s")] * len(answers)
        except Exception as error:
            return [failed(error)] if len(answers) == 1 else [one for answer in answers for one in scorer([answer])]

    return scorer


def _call(
    score: Callable[..., Any], answers: Sequence[Answer], options: dict[str, Any], most: float | None
) -> list[Any]:
    """The scores of a batch. In the calling thread if nothing speaks against it: some libraries need the main one."""
    if most is None and not inspect.iscoroutinefunction(score):
        found = score(answers, **options)
        if not inspect.isawaitable(found):
            return list(found)
        return list(_within(lambda: asyncio.run(_awaited(found)), None))

    def run() -> Any:
        found = score(answers, **options)
        return asyncio.run(_awaited(found, most)) if inspect.isawaitable(found) else found

    return list(_within(run, most))


async def _awaited(found: Any, most: float | None = None) -> Any:
    return await asyncio.wait_for(found, most)


def _within(call: Callable[[], Any], seconds: float | None) -> Any:
    """What a call gives in a thread of its own, in which there is no event loop yet.

    Raises:
        TimeoutError: it takes longer than `seconds`; it is left behind.
    """
    given: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="reward", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    if raised:
        raise raised[0]
    return given[0]
