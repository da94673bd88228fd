"""The completions of a batch of prompts as they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import Group, join_groups
from ..tokens import Document


@dataclass
class Samples:
    """A completions of P prompts, those of one prompt together, with N tokens in all; on the host.

    Args:
        groups: [P] int64, completions of each prompt.
        lengths: [A] int64, tokens of each completion.
        tokens: [N] int32.
        trained: [N] bool, whether the policy said the token; else it read it, as what a tool says.
        engine: [N] float32, log-probability of each token as the engine has it.
        advantages: [N] float32.
        used: [A] bool, whether a completion is run through the model.
        counted: [A] bool, whether it counts in what the loss is divided by; where it is not used too, its loss is zero.
        old: [N] float32, log-probability under the policy when the rollout was first trained on; NaN: not known yet.
        reference: [N] float32, the same under the reference.
    """

    groups: Tensor
    lengths: Tensor
    tokens: Tensor
    trained: Tensor
    engine: Tensor
    advantages: Tensor
    used: Tensor
    counted: Tensor
    old: Tensor
    reference: Tensor

    @property
    def firsts(self) -> Tensor:
        """[A] where each completion begins among the N tokens."""
        return self.lengths.cumsum(0) - self.lengths

    def summed(self, values: Tensor) -> Tensor:
        """[A] sums of [N] values over each completion, in float32."""
        return torch.segment_reduce(values.float(), "sum", lengths=self.lengths)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def unused(self) -> tuple[int, int]:
        """(completions, tokens) that count, and whose loss is zero without being computed."""
        idle = self.counted & ~self.used
        return int(idle.sum()), int(self.trained[idle.repeat_interleave(self.lengths)].sum())

    def joined(self, prompts: Sequence[np.ndarray]) -> dict[str, Any]:
        """A row of all completions that are used, each prompt standing once; of none, the first one stands in without a
        count, so that a model that is cut over several ranks is run by all of them.

        Args:
            prompts: [P] ids of each.

        Returns:
            the tensors of `batch.join_groups`; `at` [R] int64, where each token with loss is among the N; and those of
            these tokens, `engine`, `advantages`, `old`, `reference` [R]; `counted` [A'] float32, 0 for a stand-in.
        """
        used = self.used if bool(self.used.any()) else torch.arange(len(self.used)) == 0
        begins = self.firsts.tolist()
        lengths, wanted = self.lengths.tolist(), used.tolist()
        groups, places, chosen, first = [], [], [], 0
        tokens, trained = self.tokens.numpy(), self.trained.numpy()
        for prompt, number in zip(prompts, self.groups.tolist(), strict=True):
            own = [one for one in range(first, first + number) if wanted[one]]
            own.sort(key=lambda one: lengths[one])  # those of one length attend together
            first += number
            if not own:
                continue
            spans = [slice(begins[one], begins[one] + lengths[one]) for one in own]
            rests = tuple(Document(tokens[span], trained[span]) for span in spans)
            groups.append(Group(Document(prompt, np.zeros(len(prompt), dtype=bool)), rests))
            places += [np.flatnonzero(trained[span]) + span.start for span in spans]
            chosen += own
        at = torch.from_numpy(np.concatenate(places))
        data = join_groups(groups)
        columns = {name: getattr(self, name)[at] for name in ("engine", "advantages", "old", "reference")}
        return {**data, **columns, "at": at, "counted": self.used[chosen].float()}


def of_state(state: dict[str, Tensor]) -> Samples:
    """The samples that `Samples.state` gave."""
    return Samples(**state)
