"""Plays episodes: the policy's turns from an engine, the answers from environments."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .....common.errors import DataError
from ...chat import Chat
from ..engines.engine import Completion, Engine, Sampling
from ..seeds import seed
from .environment import Environment, Message
from .turns import Transcript, Turns


@dataclass
class Episode:
    """What became of one episode.

    Args:
        transcript: its tokens, and which of them the policy wrote.
        messages: all that was said.
        reward: sum over its turns; NaN if the environment failed.
        turns: of the policy.
        finished: whether the environment ended it; else it was cut: at the most turns or tokens, or in a turn.
        versions: of the weights that wrote its turns.
        error: why the environment failed.
    """

    transcript: Transcript = field(default_factory=Transcript)
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    finished: bool = False
    versions: list[int] = field(default_factory=list)
    error: str | None = None


@dataclass
class _Running:
    """An episode with its environment."""

    episode: Episode
    environment: Environment
    turns: Turns
    seed: int
    is_open: bool = True

    def fail(self, error: BaseException) -> None:
        self.episode.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.episode.reward, self.is_open = float("nan"), False


def play(
    rows: Sequence[Mapping[str, Any]],
    make: Callable[[], Environment],
    engine: Engine,
    chat: Chat,
    sampling: Sampling,
    seeds: Sequence[int],
    turns: int = 8,
    most: int | None = None,
    timeout: float | None = None,
) -> list[Episode]:
    """One episode for each row, all at the same time: each turn is one batch for the engine.

    Args:
        rows: of the data; a row for each completion of a group.
        make: gives the environment of an episode.
        engine: writes the policy's turns.
        chat: template and tokenizer.
        sampling: of a turn.
        seeds: of the episodes; each turn has its own, derived from it.
        turns: most turns of the policy.
        most: most tokens of an episode; one that has no room for another turn is cut.
        timeout: seconds that an async environment may take for one answer.

    Returns:
        the episodes, in the order of the rows. An environment that fails ends its own episode alone.
    """
    running = [_start(make, chat, number) for number in seeds]
    calls = [_call(one.environment.reset, row) if one.is_open else None for one, row in zip(running, rows, strict=True)]
    for one, said in zip(running, _answers(calls, timeout), strict=True):
        if one.is_open:
            _begin(one, said)
    ends = set(chat.terminators())
    for turn in range(turns):
        active = [one for one in running if one.is_open and _has_room(one, sampling, most)]
        if not active:
            break
        prompts = [np.array(one.episode.transcript.ids, dtype=np.int32) for one in active]
        written = engine.generate(prompts, sampling, [[seed(one.seed, turn)] for one in active])
        answered = [one for one, (said,) in zip(active, written, strict=True) if _write(one, said, chat, ends)]
        steps = _answers([_call(one.environment.step, one.episode.messages[-1]) for one in answered], timeout)
        for one, step in zip(answered, steps, strict=True):
            _advance(one, step)
    return [one.episode for one in running]


def _start(make: Callable[[], Environment], chat: Chat, number: int) -> _Running:
    environment = make()
    return _Running(Episode(), environment, Turns(chat, getattr(environment, "tools", ())), number)


def _begin(one: _Running, said: Any) -> None:
    try:
        if isinstance(said, BaseException):
            raise said
        one.episode.messages = [dict(message) for message in said]
        one.episode.transcript.read(one.turns.begin(one.episode.messages))
    except Exception as error:
        one.fail(error)


def _has_room(one: _Running, sampling: Sampling, most: int | None) -> bool:
    if most is not None and len(one.episode.transcript) + sampling.max_new_tokens > most:
        one.is_open = False
    return one.is_open


def _write(one: _Running, said: Completion, chat: Chat, ends: Collection[int]) -> bool:
    """Take a turn of the policy into an episode. False: it was cut, which ends the episode."""
    episode = one.episode
    episode.transcript.write(said.tokens.tolist(), said.log_probs.tolist())
    episode.turns += 1
    episode.versions.append(said.version)
    ids = [int(one) for one in said.tokens]
    text = str(chat.tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids))
    episode.messages.append({"role": "assistant", "content": text})
    one.is_open = bool(said.finished)
    return one.is_open


def _advance(one: _Running, step: Any) -> None:
    """Take the environment's answer into an episode."""
    episode = one.episode
    try:
        if isinstance(step, BaseException):
            raise step
        said, reward, done = step
        episode.reward += 0.0 if reward is None else float(reward)
        if not math.isfinite(episode.reward):
            raise DataError("the environment's reward is not finite", given=reward)
        if done:
            episode.finished, one.is_open = True, False
            episode.messages += [dict(message) for message in said]
            return
        if not said:
            raise DataError("the environment neither ends the episode nor says anything")
        new = [dict(message) for message in said]
        last = episode.transcript.ids[-1]
        episode.transcript.read(one.turns.between(episode.messages[:-1], new, last))
        episode.messages += new
    except Exception as error:
        one.fail(error)


def _call(method: Callable[[Any], Any], given: Any) -> Any:
    """What a method gives, which may have to be awaited; an error as itself."""
    try:
        return method(given)
    except Exception as error:
        return error


def _answers(calls: Sequence[Any], timeout: float | None) -> list[Any]:
    """The results of calls; those that are async are awaited together."""
    waiting = {place: one for place, one in enumerate(calls) if inspect.isawaitable(one)}
    if not waiting:
        return list(calls)
    found: list[Any] = []

    async def together() -> None:
        limited = [asyncio.wait_for(one, timeout) for one in waiting.values()]
        found.extend(await asyncio.gather(*limited, return_exceptions=True))

    thread = threading.Thread(target=lambda: asyncio.run(together()))  # no event loop is running there yet
    thread.start()
    thread.join()
    results = dict(zip(waiting, found, strict=True))
    return [results.get(place, one) for place, one in enumerate(calls)]
