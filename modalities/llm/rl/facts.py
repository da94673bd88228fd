"""What is told of a rollout in the curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .advantages import Total, deviation, is_flat
from .rollout import Drawn
from .samples import Samples


def facts(drawn: Sequence[Drawn], samples: Sequence[Samples], names: Sequence[str], total: Total) -> dict[str, float]:
    """Means over all completions of a rollout, the same on every rank.

    Args:
        drawn: this rank's prompts with their completions.
        samples: what is trained on them.
        names: of the rewards.
        total: sums over the ranks.

    Returns:
        `reward`, `reward_std`, and `reward/NAME` of each reward alone; `advantage_std`, of what counts in the loss;
        `completion_tokens`; shares of completions: `truncated`, `unscored` (without a reward), `trained` (run through
        the model); shares of prompts: `zero_variance`, `resampled`.
    """
    nothing = np.zeros(0)
    rewards = np.concatenate([one.rewards for one in drawn] or [nothing])
    found = dict(zip(("reward", "reward_std"), deviation(rewards, total), strict=True))
    for name in names:
        values = np.concatenate([one.by_name[name] for one in drawn] or [nothing])
        found[f"reward/{name}"] = deviation(values, total)[0]
    advantages = [one.advantages[one.firsts][one.counted].double().numpy() for one in samples]
    found["advantage_std"] = deviation(np.concatenate(advantages or [nothing]), total)[1]
    every = [one for group in drawn for one in group.completions]
    of_completions = {
        "completion_tokens": sum(one.said for one in every),
        "truncated": sum(not one.finished for one in every),
        "unscored": int(np.isnan(rewards).sum()),
        "trained": sum(int(one.used.sum()) for one in samples),
    }
    of_prompts = {
        "zero_variance": sum(bool(is_flat(one.rewards[None])[0]) for one in drawn),
        "resampled": sum(one.attempt > 0 for one in drawn),
    }
    sums = total(np.array([*of_completions.values(), len(every), *of_prompts.values(), len(drawn)], dtype=np.float64))
    first, second = sums[: len(of_completions) + 1], sums[len(of_completions) + 1 :]
    for names_of, part in ((of_completions, first), (of_prompts, second)):
        found |= {name: float(value / max(part[-1], 1)) for name, value in zip(names_of, part, strict=False)}
    return found
