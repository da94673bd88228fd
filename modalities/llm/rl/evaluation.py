"""What the answers to held-out prompts are worth: mean rewards and pass@k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, isnan
from typing import Any

from ....common.evaluation.each import Part
from .rollout import Drawn


@dataclass(frozen=True)
class Judged:
    """The answers to one prompt.

    Args:
        fields: what it may be sliced by.
        where: place of the row.
        prompt: as the model reads it.
        answers: texts of n answers.
        rewards: total reward of each, NaN where there is none.
        by_name: the same of each reward alone.
        tokens: of each.
        finished: whether the model ended each by itself.
    """

    fields: Mapping[str, Any]
    where: str
    prompt: str
    answers: tuple[str, ...]
    rewards: tuple[float, ...]
    by_name: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    finished: tuple[bool, ...] = ()


def judged(drawn: Drawn, tokenizer: Any) -> Judged:
    """The answers of a rollout."""
    return Judged(
        drawn.asked.fields,
        drawn.asked.where,
        str(tokenizer.decode(drawn.completions[0].prompt.tolist())),
        tuple(one.text for one in drawn.completions),
        tuple(drawn.rewards.tolist()),
        {name: tuple(values.tolist()) for name, values in drawn.by_name.items()},
        tuple(one.said for one in drawn.completions),
        tuple(one.finished for one in drawn.completions),
    )


def pass_at(number: int, right: int, k: int) -> float:
    """Probability that one of k answers is right, of `number` answers of which `right` are: 1 - C(n - c, k) / C(n, k),
    without bias (Chen et al., arXiv:2107.03374, eq. 1)."""
    return 1 - comb(number - right, k) / comb(number, k)


def names(rewards: Sequence[str], k: Sequence[int]) -> dict[str, str]:
    """The metrics, and that the larger are better; the first decides if the recipe does not say."""
    return dict.fromkeys(["reward", *(f"pass@{one}" for one in k), *(f"reward/{name}" for name in rewards)], "max")


def means(records: Sequence[Judged], k: Sequence[int], passed: float) -> dict[str, Any]:
    """Metrics of some prompts together. An answer without a reward counts in no mean, and does not pass.

    Args:
        records: of the prompts.
        k: of pass@k.
        passed: total reward from which an answer passes.
    """
    number = sum(len(one.answers) for one in records)
    if not number:
        return {"answers": 0}
    found: dict[str, Any] = {"reward": _mean([value for one in records for value in one.rewards])}
    rights = [(len(one.answers), sum(value >= passed for value in one.rewards)) for one in records]
    for one in k:
        found[f"pass@{one}"] = sum(pass_at(of, right, one) for of, right in rights) / len(records)
    for name in records[0].by_name:
        found[f"reward/{name}"] = _mean([value for one in records for value in one.by_name[name]])
    return {
        **found,
        "answers": number,
        "unscored": sum(isnan(value) for one in records for value in one.rewards),
        "unfinished": sum(not is_finished for one in records for is_finished in one.finished) / number,
        "answer_tokens": sum(sum(one.tokens) for one in records) / number,
    }


def parts(record: Judged, k: Sequence[int], passed: float) -> dict[str, Part]:
    """What one prompt adds to its means."""
    right = sum(value >= passed for value in record.rewards)
    known = {"reward": record.rewards, **{f"reward/{name}": values for name, values in record.by_name.items()}}
    sums = {name: [value for value in values if not isnan(value)] for name, values in known.items()}
    return {
        **{name: (sum(values), float(len(values))) for name, values in sums.items()},
        **{f"pass@{one}": (pass_at(len(record.answers), right, one), 1.0) for one in k},
    }


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not isnan(value)]
    return sum(known) / len(known) if known else float("nan")


def shown(records: Sequence[Judged], number: int) -> list[dict[str, Any]]:
    """Some answers for reading, evenly spread over the set."""
    step = max(1, len(records) // max(1, number))
    return [
        {
            "where": one.where,
            "prompt": one.prompt,
            "answer": one.answers[0],
            "reward": one.rewards[0],
            **{f"reward/{name}": values[0] for name, values in one.by_name.items()},
        }
        for one in records[::step][:number]
    ]
