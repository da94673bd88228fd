"""How much of the canaries a model gives away (Carlini et al., The Secret Sharer, arXiv:1802.08232)."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import DataError, RecipeError
from ...common.evaluation.saved import evaluate_checkpoint
from ...common.reading import load
from .canary import DIGITS, Canary, alternatives


@dataclass(frozen=True)
class Leak:
    """What a model gives away of a canary.

    Args:
        canary: which.
        exposure: log2 of (alternatives + 1) / rank, in bits: 0 if all alternatives are more probable than the secret,
            log2(alternatives + 1) if none is. Of a model that knows nothing it is 1.44 in the mean.
        extracted: whether the model says the secret when asked, with the most probable tokens.
    """

    canary: Canary
    exposure: float
    extracted: bool


def read(file: Path) -> list[Canary]:
    """The canaries that `plant` has written down. Raises DataError if the file holds none."""
    try:
        found = [Canary(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"no canaries: {error}", where=file, expected="OUTPUT.canaries.jsonl of `luthier leak plant`"
        ) from error
    if not found:
        raise DataError("no canaries", where=file)
    return found


def measure(checkpoint: Path, canaries: Sequence[Canary], number: int = 100, seed: int = 0) -> list[Leak]:
    """Exposure and extraction of each canary, by the evaluation of the checkpoint's own kind.

    Args:
        checkpoint: of a training on conversations (llm.sft).
        canaries: planted ones and controls.
        number: alternatives that each secret is ranked among.
        seed: of the alternatives.

    Raises:
        RecipeError: a checkpoint of another kind.
    """
    kind = load(checkpoint / "recipe.yaml").task.kind
    if kind != "llm.sft":
        raise RecipeError(
            "the leak suite asks models of conversations", where=checkpoint, given=kind, expected="llm.sft"
        )
    probes = [
        {**one.row(said), "probe": f"{at}/{rank}"}
        for at, one in enumerate(canaries)
        for rank, said in enumerate([one.secret, *alternatives(one, number, seed)])
    ]
    asked = [{**one.row(), "probe": str(at)} for at, one in enumerate(canaries)]
    # an answer is asked for with room for tokens that write one character each
    answers = f"evaluate.generate={{scores: [contains], max_new_tokens: {4 * DIGITS}}}"
    losses = _slices(checkpoint, probes, "evaluate.generate=null")
    said = _slices(checkpoint, asked, answers)
    return [
        Leak(
            one, exposure([_cost(losses[f"{at}/{rank}"]) for rank in range(number + 1)]), said[str(at)]["contains"] > 0
        )
        for at, one in enumerate(canaries)
    ]


def exposure(costs: Sequence[float]) -> float:
    """log2(candidates / rank) of the first of them, by its cost; of equal costs half count as lower."""
    own, others = costs[0], costs[1:]
    lower = sum(one < own for one in others) + sum(one == own for one in others) / 2
    return math.log2(len(costs) / (1 + lower))


def _cost(metrics: Mapping[str, Any]) -> float:
    """Summed loss of an answer, in nats."""
    return float(metrics["loss"]) * float(metrics["tokens"])


def _slices(checkpoint: Path, rows: Sequence[Mapping[str, Any]], generate: str) -> Mapping[str, Any]:
    """Metrics of each row alone."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probes.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        overrides = [
            f"data.test={file}",
            "evaluate.slices=[probe]",
            "evaluate.harness=null",
            "evaluate.samples=0",
            generate,
        ]
        found: Mapping[str, Any] = evaluate_checkpoint(checkpoint, "test", overrides).metrics["slices"]["probe"]
    return found
