"""The completions of a batch of prompts as they are trained on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import Group, join_groups
from ..tokens import Document

COLUMNS = ("engine", "advantages", "old", "reference", "values", "returns")
"""What is known of each token."""


@dataclass
class Samples:
    """A completions after P prompts, those of one prompt together, with N tokens in all; on the host.

    Args:
        prompts: the tokens of the prompts, int32.
        prompt_lengths: [P] int64, tokens of each prompt.
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
        values: [N] float32, of a critic, what was expected before the token; NaN: there is none.
        returns: [N] float32, what it is trained to expect.
    """

    prompts: Tensor
    prompt_lengths: Tensor
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
    values: Tensor
    returns: Tensor

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

    def lacks(self, name: str) -> bool:
        """Whether `old`, `reference`, `values` or `returns` is not known yet of a token that the policy said."""
        return bool(getattr(self, name)[self.trained].isnan().any())

    def joined(self) -> dict[str, Any]:
        """A row of all completions that are used, each prompt standing once; of none, the first one stands in without a
        count, so that a model that is cut over several ranks is run by all of them.

        Returns:
            the tensors of `batch.join_groups`; `at` [R] int64, where each token with loss is among the N; and those of
            these tokens [R] (`COLUMNS`), None where one is not known; `counted` [A'] float32, 0 for a stand-in.
        """
        used = self.used if bool(self.used.any()) else torch.arange(len(self.used)) == 0
        begins = self.firsts.tolist()
        lengths, wanted = self.lengths.tolist(), used.tolist()
        groups, places, chosen, first = [], [], [], 0
        tokens, trained = self.tokens.numpy(), self.trained.numpy()
        prompts = [one.numpy() for one in self.prompts.split(self.prompt_lengths.tolist())]
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
        columns = {name: getattr(self, name)[at] for name in COLUMNS}
        known = {name: None if len(one) and bool(one.isnan().any()) else one for name, one in columns.items()}
        return {**data, **known, "at": at, "counted": self.used[chosen].float()}


def of_state(state: dict[str, Tensor]) -> Samples:
    """The samples that `Samples.state` gave."""
    return Samples(**state)
