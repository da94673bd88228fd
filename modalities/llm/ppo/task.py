"""PPO: each token is compared with what a critic expected before it (Schulman et al., arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ....common.task import LossSum
from ..losses.grpo import grpo, of_tokens
from ..losses.sampled import Sampled
from ..losses.value import value_loss
from ..rl.advantages import gae, whitened
from ..rl.rollout import Drawn
from ..rl.samples import Samples
from ..rl.task import OnlineTask
from ..rl.terms import MEASURED, correction, measure
from .config import Config
from .critic import ValueHead


class Task(OnlineTask):
    """Trains a causal language model, or an adapter of it, on its own completions of prompts, and with it a critic, a
    linear layer on the same hidden states. The reward comes with a completion's last token, the penalty with each."""

    meter_names: ClassVar[tuple[str, ...]] = (*MEASURED, "value", "value_loss")

    recipe: Config  # type: ignore[assignment]

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self._settings = recipe.task.settings(recipe.most_tokens)
        width = self.causal.config.get_text_config().hidden_size
        self.value = ValueHead(width, weights or Path(recipe.model.adapter or recipe.model.path))

    @property
    def needs_reference(self) -> bool:
        return bool(self.recipe.task.kl.weight)

    # ------------------------------------------------------------------ advantages

    def assign(self, drawn: Sequence[Sequence[Drawn]], samples: Sequence[Samples]) -> None:
        """Advantages and returns of each token, from its reward and the critic's values."""
        task = self.recipe.task
        for at, (part, made) in enumerate(zip(drawn, samples, strict=True)):
            self._look(made, with_policy=at >= self.trainer.accumulate_grad_batches)
            rewards = np.concatenate([one.rewards for one in part])  # [A]
            each = -self.penalties(made, task.kl)  # [N]
            each[(made.firsts + made.lengths - 1).numpy()] += np.nan_to_num(rewards)
            said, counts = made.trained, made.summed(made.trained).long().numpy()
            values = made.values[said].double().numpy()
            found = gae(each[said.numpy()], values, counts, task.gamma, task.gae_lambda)
            made.advantages[said] = torch.from_numpy(found).float()
            made.returns[said] = torch.from_numpy(found + values).float()
            counted = ~np.isnan(rewards)
            if task.mask_truncated:
                counted &= np.array([one.finished for group in part for one in group.completions])
            made.counted = made.used = torch.from_numpy(counted)
        if task.whiten:
            self._whiten(samples)

    def _look(self, made: Samples, with_policy: bool) -> None:
        """Compute the values of all tokens, and the log-probabilities where the policy will have moved."""
        whole = self.whole(made)
        if with_policy:
            log_probs, _, out = self.policy_of(whole)
            made.old[whole["host"]] = log_probs.float().cpu()
        else:
            out = self._run(whole)
        made.values[whole["host"]] = self._expected(out, whole).cpu()

    def _whiten(self, samples: Sequence[Samples]) -> None:
        """Over all tokens of the rollout that count."""
        places = [one.trained & one.counted.repeat_interleave(one.lengths) for one in samples]
        known = [one.advantages[place].double().numpy() for one, place in zip(samples, places, strict=True)]
        found = torch.from_numpy(whitened(np.concatenate(known), self.total)).float()
        for one, place, own in zip(samples, places, found.split([len(part) for part in known]), strict=True):
            one.advantages[place] = own

    def _expected(self, out: Any, made: dict[str, Any]) -> Tensor:
        """[R] what is expected before each token."""
        found: Tensor = self.value(out.last_hidden_state[0][made["places"]])
        return found

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """The loss of a batch of completions, a mean over their tokens."""
        task, made = self.recipe.task, self.completed(data)
        own, entropy, out = self.policy_of(made, bool(task.entropy_weight))
        values = self._expected(out, made)
        before = values.detach() if made["values"] is None else made["values"]
        returns = made["advantages"] + before if made["returns"] is None else made["returns"]
        given = Sampled(own, self.old_of(made, own), made["advantages"], made["counts"])
        terms = grpo(given, self._settings)
        if self.recipe.rollout.correction != "none":
            terms = terms * correction(given, made["engine"], self.recipe.rollout)
        errors = value_loss(values, before, returns, task.value_clip)
        counted = given.spread(made["counted"])
        bonus = task.entropy_weight * entropy if task.entropy_weight else 0.0
        total = ((terms + task.value_weight * errors - bonus) * counted).sum()
        ratio = of_tokens(given).detach()
        measure(self._meter, given, ratio, self._settings, entropy, made["engine"], made["reference"], counted)
        for name, each in (("value", values), ("value_loss", errors)):
            self._meter.add(name, (each.detach() * counted).sum(), counted.sum())
        return self.with_router(total, float(made["tokens"]), out)

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, directory: Path) -> None:
        super().save_pretrained(directory)
        self.value.save(directory)
