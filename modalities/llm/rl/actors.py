"""What the policy does when it is asked: it answers, or it acts in an environment for some turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..chat import Chat
from .engines.engine import Completion, Engine, Sampling
from .environments.environment import Environment, EnvironmentSection
from .environments.rollout import Episode, play
from .prompts import Asked
from .rewards.answer import Answer


@dataclass(frozen=True)
class Trajectory:
    """What the policy said after a prompt, and what it read in between.

    Args:
        prompt: [T'] int32.
        tokens: [T] int32, what follows, up to the last that the policy said.
        trained: [T] bool, whether the policy said the token; else it read it, as what a tool says.
        log_probs: [T] float32, of the engine; 0 of tokens that were read.
        versions: of the weights that it was drawn with.
        text: all of it, for reading.
        answer: what the rewards judge.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    trained: np.ndarray
    log_probs: np.ndarray
    versions: tuple[int, ...]
    text: str
    answer: Answer

    @property
    def finished(self) -> bool:
        """Whether it ended by itself; else it was cut."""
        return self.answer.finished

    @property
    def said(self) -> int:
        """Tokens that the policy said."""
        return int(self.trained.sum())


class Actor(Protocol):
    engine: Engine

    def act(self, prompts: Sequence[Asked], seeds: Sequence[Sequence[int]]) -> list[list[Trajectory]]:
        """A trajectory for each seed of each prompt."""
        ...


class Answering:
    """Answers at once.

    Args:
        engine: draws.
        sampling: of an answer.
        tokenizer: makes texts of tokens.
    """

    def __init__(self, engine: Engine, sampling: Sampling, tokenizer: Any):
        self.engine, self.sampling, self.tokenizer = engine, sampling, tokenizer

    def act(self, prompts: Sequence[Asked], seeds: Sequence[Sequence[int]]) -> list[list[Trajectory]]:
        made = self.engine.generate([one.ids for one in prompts], self.sampling, seeds)
        return [[self._answered(asked, one) for one in group] for asked, group in zip(prompts, made, strict=True)]

    def _answered(self, asked: Asked, made: Completion) -> Trajectory:
        ids = made.tokens[:-1] if made.finished else made.tokens
        text = str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))
        answer = Answer(asked.prompt, text, len(made.tokens), made.finished, asked.row)
        trained = np.ones(len(made.tokens), dtype=bool)
        return Trajectory(asked.ids, made.tokens, trained, made.log_probs, (made.version,), text, answer)


class Acting:
    """Acts in an environment, that makes the prompt of the row.

    Args:
        engine: draws the policy's turns.
        sampling: of a turn.
        chat: writes what stands between the turns.
        section: environment, and most turns.
        most: most tokens of an episode.
    """

    def __init__(self, engine: Engine, sampling: Sampling, chat: Chat, section: EnvironmentSection, most: int):
        self.engine, self.sampling, self.chat, self._section, self._most = engine, sampling, chat, section, most
        self._make: Callable[[], Environment] = section.maker()

    def act(self, prompts: Sequence[Asked], seeds: Sequence[Sequence[int]]) -> list[list[Trajectory]]:
        rows = [asked.row for asked, of in zip(prompts, seeds, strict=True) for _ in of]
        flat = [one for of in seeds for one in of]
        bounds = self._section.turns, self._most, self._section.timeout
        episodes = iter(play(rows, self._make, self.engine, self.chat, self.sampling, flat, *bounds))
        return [[self._played(asked, next(episodes)) for _ in of] for asked, of in zip(prompts, seeds, strict=True)]

    def _played(self, asked: Asked, episode: Episode) -> Trajectory:
        """An episode in which the policy has said nothing has one token, which is never trained, in its place."""
        transcript, failure = episode.transcript, episode.error
        prompt = np.array(transcript.ids[: transcript.prompt], np.int32)
        tokens, trained, log_probs = transcript.after_prompt()
        end = int(np.flatnonzero(trained)[-1]) + 1 if len(trained) else 0
        if not end:
            failure = failure or "the prompt leaves no room for a turn"
            prompt = prompt if len(prompt) else np.array(self.sampling.stops[:1] or (0,), np.int32)
            tokens, trained, log_probs, end = prompt[:1], np.ones(1, dtype=bool), np.zeros(1, np.float32), 1
        roles = [str(one["role"]) for one in episode.messages]
        answers = [number for number, role in enumerate(roles) if role == "assistant"]
        turns = answers[len(answers) - episode.turns :]  # a prompt may show some that are not the policy's
        answer = Answer(
            tuple(episode.messages[: turns[0]] if turns else episode.messages),
            str(episode.messages[turns[-1]]["content"]) if turns else "",
            int(trained.sum()),
            episode.finished,
            asked.row,
            tuple(episode.messages),
            episode.reward,
            failure,
        )
        text = str(self.chat.tokenizer.decode(tokens[:end].tolist()))
        return Trajectory(prompt, tokens[:end], trained[:end], log_probs[:end], tuple(episode.versions), text, answer)
