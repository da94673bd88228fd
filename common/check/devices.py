"""Do two devices compute what one does? Two processes beside one, on the same global batches."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ..data.stream import Streamed
from ..errors import LuthierError
from ..training import curves
from ..verify.processes import Sitting
from . import memory
from .checklist import NotApplicable
from .saving import quietly, short
from .subject import Subject, beside

STEPS = 2
TOLERANCE = 1e-3
"""Of losses and gradient norms in 32 bits: the devices' sums are taken in another order."""
MOST_PARAMETERS = 5e8
"""Models above it are not run on two processes of a CPU."""
PATIENCE = 300.0
"""Seconds that the two processes may take."""
COMPARED = ("train/loss", "train/gradient_norm")


def equal(subject: Subject) -> tuple[None, str]:
    """Losses and gradient norms of two steps on two processes (gloo on CPUs, or two GPUs if there are) and on one."""
    recipe, several = subject.recipe, torch.cuda.device_count() > 1
    _room(subject, several)
    both = {
        "accelerator": "gpu" if several else "cpu", "strategy": "ddp", "tensor_parallel": None, "nodes": 1,
        "precision": "32", "compile": False,
    }  # fmt: skip
    with beside(recipe) as place:
        one = {**both, "devices": 1, "strategy": "auto", "accumulate": 2 * recipe.train.accumulate}
        try:
            quietly(short(recipe, place / "one", STEPS, **one), {"train": subject.given})
        except LuthierError as error:
            raise NotApplicable(f"it can't be run in one process here: {error.problem}") from error
        file = place / "two.yaml"
        file.write_text(short(recipe, place / "two", STEPS, **both, devices=2).dump(), encoding="utf-8")
        sitting = Sitting(["train", str(file)], place / "two.log", forked=False)
        code = sitting.exit_code(PATIENCE)
        if code is None:
            sitting.kill()
            raise NotApplicable(f"two processes took longer than {PATIENCE:.0f} s here", "try it on the machine itself")
        if code:
            raise LuthierError("a run on two processes failed", where="train.devices", given=sitting.tail())
        found = [(name, *_apart(place, name)) for name in COMPARED]
    worst = max(found, key=lambda each: each[1])
    if not worst[1] <= TOLERANCE:
        raise LuthierError(
            "two devices do not compute what one does",
            where="train.devices",
            given=f"{worst[0]}: {worst[2]} on one, {worst[3]} on two",
            expected=f"the same within {TOLERANCE:g}",
        )
    kind = "two GPUs" if several else "two processes (gloo)"
    return None, f"{kind} and one, {STEPS} steps on the same global batches: within {worst[1]:.1g}"


def _room(subject: Subject, several: bool) -> None:
    """Raise NotApplicable where two more models can't be run."""
    task = subject.task
    assert task is not None
    if task.compares_ranks:
        raise NotApplicable("its loss compares with what other devices have: more of them change it, on purpose")
    if isinstance(subject.given, Streamed):
        raise NotApplicable("a stream is read anew by each process", "try it with a file of some rows")
    size = sum(parameter.numel() for parameter in task.parameters())
    if not several and size > MOST_PARAMETERS:
        raise NotApplicable(
            "there are no two GPUs, and the model is too large for two processes of the CPU",
            "run the check on a machine with two devices",
        )
    needed = 3 * 16 * size if not several else 0  # weights, gradients and two moments of one run and of two more
    free = memory.free(torch.device("cpu"))
    if needed > free:
        raise NotApplicable(
            f"no room for it: about {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free",
            "run the check on a machine with more memory",
        )
    if subject.reading > PATIENCE / 3:
        raise NotApplicable(
            f"each process reads the data, which takes {subject.reading:.0f} s",
            "check the recipe with a part of it as data.train",
        )


def _apart(place: Path, name: str) -> tuple[float, float, float]:
    """(largest relative difference, value on one, value on two) of a curve."""
    one, two = (
        [float(row["value"]) for row in curves.read(place / side / "curves.csv") if row["name"] == name]
        for side in ("one", "two")
    )
    if len(one) != len(two) or not one:
        return math.inf, math.nan, math.nan
    scale = max(map(abs, one)) or 1.0
    return max((abs(a - b) / scale, a, b) for a, b in zip(one, two, strict=True))
