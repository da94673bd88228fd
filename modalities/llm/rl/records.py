"""All completions of a training with their rewards, one Parquet file for each rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rollout import Drawn
from .samples import Samples

FOLDER = "rollouts"


def rows(drawn: Sequence[Drawn], samples: Samples, tokenizer: Any, rollout: int, step: int) -> list[dict[str, Any]]:
    """A row for each completion of a batch.

    Args:
        drawn: its prompts with their completions.
        samples: what is trained on them.
        tokenizer: makes texts of prompts.
        rollout: number of the rollout.
        step: optimizer steps done before it.
    """
    found = []
    advantages = samples.advantages[samples.firsts].tolist()
    used, at = samples.used.tolist(), 0
    for one in drawn:
        for number, completion in enumerate(one.completions):
            found.append(
                {
                    "rollout": rollout,
                    "step": step,
                    "where": one.asked.where,
                    "completion_number": number,
                    "attempt": one.attempt,
                    "prompt": str(tokenizer.decode(completion.prompt.tolist())),
                    "completion": completion.text,
                    "tokens": completion.said,
                    "finished": completion.finished,
                    "reward": float(one.rewards[number]),
                    **{f"reward/{name}": float(values[number]) for name, values in one.by_name.items()},
                    "error": one.errors.get(number),
                    "advantage": advantages[at],
                    "trained": used[at],
                    "log_prob": float(completion.log_probs.sum()),
                }
            )
            at += 1
    return found


def write(folder: Path, rollout: int, records: Sequence[dict[str, Any]]) -> None:
    """Write the file of a rollout, in place of one that a run left which went on from an earlier checkpoint."""
    import pyarrow as pa
    from pyarrow import parquet

    place = folder / FOLDER / f"rollout-{rollout:08d}.parquet"
    place.parent.mkdir(parents=True, exist_ok=True)
    kinds = {"error": pa.string()}
    table = pa.table({name: pa.array([row[name] for row in records], kinds.get(name)) for name in records[0]})
    new = place.with_suffix(".new")
    parquet.write_table(table, new, compression="zstd")
    new.replace(place)
