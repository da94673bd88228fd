"""The interface of what draws completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        max_new_tokens: most tokens of a completion, the one that ends it included.
        stops: ids of all tokens that end a completion.
        temperature: of the distribution; 0: the most probable token is taken.
        top_p: only the most probable tokens with this probability in all are drawn from; 1: all.
        top_k: only so many of the most probable tokens are drawn from; None: all.
    """

    max_new_tokens: int
    stops: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None


@dataclass(frozen=True)
class Completion:
    """What the policy says after a prompt.

    Args:
        tokens: [T] int32, with the one that ended it.
        log_probs: [T] float32, log-probability of each token in nats, under the whole distribution at the sampling
            temperature (at 1 if that is 0), whatever `top_p` and `top_k` leave out.
        finished: whether it ended by itself; else it was cut at the most tokens allowed.
        version: of the weights that it was drawn with.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    finished: bool
    version: int


class Weights(Protocol):
    """Where an engine that does not share the trainer's memory gets new weights from."""

    @property
    def model(self) -> Any:
        """What is trained: a transformers model, or PEFT's around it."""
        ...

    def save_pretrained(self, directory: Path) -> None:
        """Write the model or its adapter in the format of its own ecosystem."""
        ...


class Engine(Protocol):
    """Draws completions. What it draws for a prompt depends on the weights, the prompt, the sampling and the seed, and
    not on what else is asked.

    Each process of a training has its own, and asks for completions of its own prompts."""

    gathers: Literal["nothing", "first", "every"]
    """Which processes of a training hold whole weights during `update`."""

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """Completions of each prompt.

        Args:
            prompts: [T] int32 each, one token at least.
            sampling: how tokens are drawn.
            seeds: of each completion of each prompt.
        """
        ...

    def update(self, version: int, weights: Weights) -> None:
        """From now on complete with the weights as they are now, which are called `version`; all processes of a
        training do this together."""
        ...
