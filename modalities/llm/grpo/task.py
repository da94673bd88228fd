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
from .config import Config


class Task(OnlineTask):
    """Trains a causal language model, or an adapter of it, on its own completions of prompts, by GRPO and its kin."""

    meter_names: ClassVar[tuple[str, ...]] = ("entropy", "kl", "clip_low", "clip_high", "engine_kl")

    recipe: Config  # type: ignore[assignment]

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self._settings = recipe.task.settings(recipe.rollout.max_new_tokens)
        self._online = recipe.task.online

    @property
    def needs_reference(self) -> bool:
        return bool(self.recipe.task.kl.weight)

    @property
    def resample(self) -> int:
        return self.recipe.task.resample if self.recipe.task.zero_variance == "resample" else 0

    # ------------------------------------------------------------------ advantages

    def assign(self, drawn: Sequence[Sequence[Drawn]], samples: Sequence[Samples], datas: Sequence[Any]) -> None:
        """Advantages from the rewards of each group; over the batch where that is asked for."""
        task = self.recipe.task
        rewards = np.stack([one.rewards for part in drawn for one in part])  # [P, G]
        penalties = [self._penalties(made, data) for made, data in zip(samples, datas, strict=True)]
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

    def _penalties(self, made: Samples, data: dict[str, Any]) -> np.ndarray:
        """[N] what is taken from the reward for each token."""
        task = self.recipe.task
        if not task.kl_in_reward:
            return np.zeros(len(made.tokens))
        self.fill(made, data, "reference")
        found = task.kl.weight * divergence(made.engine, made.reference, task.kl.estimator)
        return torch.where(made.trained, found, 0.0).double().numpy()

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
        old = own.detach() if made["old"] is None else made["old"]  # the policy has not moved: a ratio of exactly 1
        if self.recipe.rollout.iterations > 1 and made["old"] is None:
            made["samples"].old[made["host"]] = old.float().cpu()
        given = Sampled(own, old, made["advantages"], made["counts"])
        values = self._online.term(given, self._settings)
        if self.recipe.rollout.correction != "none":
            values = values * self._correction(given, made["engine"])
        if reference is not None:
            apart = divergence(own, reference, task.kl.estimator)
            values = values + task.kl.weight * apart
        if task.entropy_weight:
            values = values - task.entropy_weight * entropy
        counted = given.spread(made["counted"])
        total = (values * weights(self._online.share, given.counts) * counted).sum()
        count = denominator(self._online.share, made["completions"], made["tokens"], self._settings.max_tokens)
        self._measure(given, entropy, reference, made["engine"], counted)
        if not self._router_weight:
            return LossSum(total, count)
        router = self._router_loss(out.router_logits) * count
        return LossSum(total + self._router_weight * router, count, {"router": float(router.detach())})

    def _reference(self, made: dict[str, Any]) -> Tensor:
        """[R] log-probabilities under the reference, computed in the first pass."""
        if made["reference"] is not None:
            found: Tensor = made["reference"]
            return found
        found = self.reference_of(made)
        if self.recipe.rollout.iterations > 1:
            made["samples"].reference[made["host"]] = found.float().cpu()
        return found

    def _correction(self, given: Sampled, engine: Tensor) -> Tensor:
        """[R] truncated trainer's / engine's probability, when the completions were drawn."""
        ratio = given.old - engine
        if self.recipe.rollout.correction == "completion":
            ratio = given.spread(given.summed(ratio))
        return ratio.exp().clamp(max=self.recipe.rollout.correction_cap)

    @torch.no_grad()
    def _measure(
        self, given: Sampled, entropy: Tensor, reference: Tensor | None, engine: Tensor, counted: Tensor
    ) -> None:
        """Means over the tokens that are trained: the entropy; the KL from the reference (k3) and from the engine (k3);
        shares of tokens that are clipped below and above."""
        count, ratio, settings = counted.sum(), self._online.ratio(given), self._settings
        self._meter.add("entropy", (entropy * counted).sum(), count)
        if reference is not None:
            self._meter.add("kl", (divergence(given.log_probs, reference, "k3") * counted).sum(), count)
        self._meter.add("engine_kl", (divergence(engine, given.old, "k3") * counted).sum(), count)
        low = (ratio < 1 - settings.clip_low) & (given.advantages < 0)
        high = (ratio > 1 + settings.clip_high) & (given.advantages > 0)
        self._meter.add("clip_low", (low * counted).sum(), count)
        self._meter.add("clip_high", (high * counted).sum(), count)


def _sums(penalties: Sequence[np.ndarray], samples: Sequence[Samples]) -> np.ndarray:
    """[A] summed over each completion of all batches."""
    return np.concatenate(
        [np.add.reduceat(one, made.firsts.numpy()) for one, made in zip(penalties, samples, strict=True)]
    )


def _finished(drawn: Sequence[Sequence[Drawn]]) -> np.ndarray:
    """[P, G] whether a completion ended by itself."""
    return np.array([[one.finished for one in group.completions] for part in drawn for group in part])
