"""Online reinforcement learning without a critic: what a completion teaches follows from the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ....common.task import LossSum
from ..losses.kl import divergence
from ..losses.sampled import Sampled, denominator, weights
from ..rl.advantages import advantages, is_flat, to_go, whitened
from ..rl.rollout import Drawn
from ..rl.samples import Samples
from ..rl.task import OnlineTask
from ..rl.terms import MEASURED, correction, measure
from .config import Config


class Task(OnlineTask):
    """Trains a causal language model, or an adapter of it, on its own completions of prompts, by GRPO and its kin."""

    meter_names: ClassVar[tuple[str, ...]] = MEASURED

    recipe: Config  # type: ignore[assignment]

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self._settings = recipe.task.settings(recipe.most_tokens)
        self._online = recipe.task.online

    @property
    def needs_reference(self) -> bool:
        return bool(self.recipe.task.kl.weight)

    @property
    def resample(self) -> int:
        return self.recipe.task.resample if self.recipe.task.zero_variance == "resample" else 0

    # ------------------------------------------------------------------ advantages

    def assign(self, drawn: Sequence[Sequence[Drawn]], samples: Sequence[Samples]) -> None:
        """Advantages from the rewards of each group; over the batch where that is asked for."""
        task = self.recipe.task
        rewards = np.stack([one.rewards for part in drawn for one in part])  # [P, G]
        kl = task.kl if task.kl_in_reward else None
        penalties = [self.penalties(made, kl) for made in samples]
        by_token = task.used_baseline == "none" and task.used_scale in ("whiten", "none")
        if by_token and not self._online.by_completion:
            self._of_tokens(rewards, penalties, samples)
        else:
            self._of_completions(rewards - _sums(penalties, samples).reshape(rewards.shape), samples)
        unscored, finished, first = np.isnan(rewards), _finished(drawn), 0
        for part, made in zip(drawn, samples, strict=True):
            rows = slice(first, first + len(part))
            first += len(part)
            counted = ~unscored[rows]
            if task.mask_truncated:
                counted &= finished[rows]
            if task.zero_variance != "count" and task.used_baseline != "none" and not task.kl_in_reward:
                counted &= ~is_flat(rewards[rows])[:, None]
            made.counted = torch.from_numpy(counted.reshape(-1))
            made.used = made.counted & (self._regularised | made.summed(made.advantages.abs() > 0).bool())

    @property
    def _regularised(self) -> bool:
        """Whether a completion without an advantage has a gradient all the same."""
        task = self.recipe.task
        return bool(task.kl_in_loss or task.entropy_weight or self._router_weight)

    def _of_completions(self, rewards: np.ndarray, samples: Sequence[Samples]) -> None:
        """One advantage for all tokens of a completion, from rewards [P, G]."""
        task = self.recipe.task
        found = advantages(rewards, task.used_baseline, task.used_scale, self.total)
        every = torch.from_numpy(np.nan_to_num(found).reshape(-1)).float()
        for made, own in zip(samples, every.split([len(one.lengths) for one in samples]), strict=True):
            made.advantages = own.repeat_interleave(made.lengths)

    def _of_tokens(self, rewards: np.ndarray, penalties: Sequence[np.ndarray], samples: Sequence[Samples]) -> None:
        """The advantage of a token is the reward without the penalties from it on (REINFORCE++, arXiv:2501.03262)."""
        each = np.split(rewards.reshape(-1), np.cumsum([len(one.lengths) for one in samples])[:-1])
        found = [
            np.repeat(own, made.lengths.numpy()) - to_go(penalty, made.lengths.numpy())
            for own, penalty, made in zip(each, penalties, samples, strict=True)
        ]
        kept = [np.where(made.trained.numpy(), one, np.nan) for one, made in zip(found, samples, strict=True)]
        whole = np.concatenate(kept)
        if self.recipe.task.used_scale != "none":
            whole = whitened(whole, self.total)
        parts = np.split(np.nan_to_num(whole), np.cumsum([len(one) for one in kept])[:-1])
        for made, one in zip(samples, parts, strict=True):
            made.advantages = torch.from_numpy(one).float()

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """The loss of a batch of completions; only their tokens are projected onto the vocabulary."""
        task, made = self.recipe.task, self.completed(data)
        reference = self._reference(made) if task.kl_in_loss else None
        own, entropy, out = self.policy_of(made, bool(task.entropy_weight))
        given = Sampled(own, self.old_of(made, own), made["advantages"], made["counts"])
        values = self._online.term(given, self._settings)
        if self.recipe.rollout.correction != "none":
            values = values * correction(given, made["engine"], self.recipe.rollout)
        if reference is not None:
            apart = divergence(own, reference, task.kl.estimator)
            values = values + task.kl.weight * apart
        if task.entropy_weight:
            values = values - task.entropy_weight * entropy
        counted = given.spread(made["counted"])
        total = (values * weights(self._online.share, given.counts) * counted).sum()
        count = denominator(self._online.share, made["completions"], made["tokens"], self._settings.max_tokens)
        ratio = self._online.ratio(given)
        measure(self._meter, given, ratio, self._settings, entropy, made["engine"], reference, counted)
        return self.with_router(total, count, out)

    def _reference(self, made: dict[str, Any]) -> Tensor:
        """[R] log-probabilities under the reference, computed in the first pass."""
        if made["reference"] is not None:
            found: Tensor = made["reference"]
            return found
        found = self.reference_of(made)
        if self.recipe.rollout.iterations > 1:
            made["samples"].reference[made["host"]] = found.float().cpu()
        return found


def _sums(penalties: Sequence[np.ndarray], samples: Sequence[Samples]) -> np.ndarray:
    """[A] summed over each completion of all batches."""
    return np.concatenate(
        [np.add.reduceat(one, made.firsts.numpy()) for one, made in zip(penalties, samples, strict=True)]
    )


def _finished(drawn: Sequence[Sequence[Drawn]]) -> np.ndarray:
    """[P, G] whether a completion ended by itself."""
    return np.array([[one.finished for one in group.completions] for part in drawn for group in part])
