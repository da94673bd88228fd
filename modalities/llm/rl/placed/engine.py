"""The engine in processes that Ray has placed: in each a model of its own, which is given the trainer's weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from .....common.errors import ModelError
from .....common.evaluation.run import autocast
from .....common.losses import TokenLoss
from .....common.seeding import seed_everything
from ...model import Head, load_model, load_tokenizer
from ..engines.engine import Completion, Sampling, Weights
from ..engines.local import LocalEngine, parts
from ..engines.servers import OtherWeights
from .weights import fingerprint, packed, unpack
from .workers import Workers

log = logging.getLogger(__name__)

WHERE = "rollout.placement.engines"


class EngineWorker:
    """An actor: a model, which completes prompts.

    Args:
        recipe: of the training.
        weights: directory of a saved model, if the trainer's was loaded from one.
        threads: torch's threads; as many as the trainer has, so that both compute the same.
        device: that it computes on.
    """

    def __init__(self, recipe: Any, weights: Path | None, threads: int, device: str):
        self._recipe, self._weights, self._threads, self._device = recipe, weights, threads, torch.device(device)
        self._version: int | None = None

    def ready(self) -> str:
        """Load the model; gives the fingerprint of what is not trained of it."""
        torch.set_num_threads(self._threads)
        recipe = self._recipe
        seed_everything(recipe.train.seed)  # as the training does: an adapter may begin at random
        tokenizer = load_tokenizer(recipe.model, self._weights, recipe.data.chat_template)
        self._model, causal = load_model(recipe, tokenizer, self._weights)
        self._model.to(self._device).eval()
        self._engine = LocalEngine(causal, Head(causal, TokenLoss()), recipe.rollout.batch)
        return fingerprint(self._model)

    def load(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """From now on complete with these weights."""
        self._version = None  # of a mixture
        unpack(weights, self._model)
        self._engine.version = self._version = version

    def generate(
        self, version: int, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """Completions with the weights of a version.

        Raises:
            OtherWeights: it has others.
        """
        if version != self._version:
            raise OtherWeights("the engine has other weights", where=WHERE, given=self._version, expected=version)
        with torch.no_grad(), autocast(self._recipe.train.precision, self._device):
            return self._engine.generate(prompts, sampling, seeds)


class PlacedEngine:
    """Draws completions with engines that Ray has placed. All completions of a rollout are shared out evenly, at most
    `rollout.batch` of them at a time to each; what is drawn is what the trainer's own model would draw.

    Args:
        recipe: with `rollout.placement.engines`.
        weights: directory of a saved model, if the trainer's was loaded from one.
    """

    gathers: Literal["nothing", "first", "every"] = "every"

    def __init__(self, recipe: Any, weights: Path | None):
        section = recipe.rollout.placement.engines
        device = "cuda" if section.gpus else "cpu"
        self.batch, self.version = recipe.rollout.batch, 0
        given = (recipe, weights, torch.get_num_threads(), device)
        self._workers = Workers(EngineWorker, given, "engines", section, recipe.rollout.placement, self._accept)
        self._base: str | None = None
        self._is_given = False

    def update(self, version: int, weights: Weights) -> None:
        """Put the weights where all engines can read them, and have them do so."""
        self.version = version
        if self._base is None:
            self._base = fingerprint(weights.model)
        reference = self._workers.ray.put(packed(weights.model))
        self._workers.prepare(lambda actor: actor.load.remote(version, reference))
        self._is_given = True

    def _accept(self, base: str) -> None:
        if base != self._base:
            raise ModelError(
                "the engine has loaded another model than the trainer: what is not trained of them differs",
                where=WHERE,
                do="see that model.path is the same on all machines",
            )

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """See `engine.Engine`.

        Raises:
            LuthierError: a completion can't be had within the bounds; then none is given.
        """
        if not self._is_given:
            raise OtherWeights("the engines were given no weights yet", where=WHERE)
        share = math.ceil(sum(map(len, seeds)) / self._workers.number)
        every = list(parts(prompts, seeds, max(1, min(self.batch, share))))
        calls = [
            partial(self._asked, [prompts[at] for at, _ in part], sampling, [of for _, of in part]) for part in every
        ]
        found: list[list[Completion]] = [[] for _ in prompts]
        for part, made in zip(every, self._workers.map(calls), strict=True):
            for (at, _), completions in zip(part, made, strict=True):
                found[at] += completions
        other = {one.version for of in found for one in of} - {self.version}
        if other:
            raise OtherWeights("the engines have other weights", where=WHERE, given=other, expected=self.version)
        return found

    def _asked(self, prompts: list[np.ndarray], sampling: Sampling, seeds: list[Sequence[int]], actor: Any) -> Any:
        return actor.generate.remote(self.version, prompts, sampling, seeds)
