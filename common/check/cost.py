"""Is there enough memory, disk and time?"""

from __future__ import annotations

import shutil

from ..checkpoint.save import estimate
from ..console import duration
from ..errors import LuthierError
from .checklist import NotApplicable
from .subject import Subject, beside

TIGHT = 0.95
"""Share of the memory that a run may take: evaluations and fragments need some too."""


def memory(subject: Subject) -> tuple[None, str]:
    """The peak of the short training, optimizer included, against what was free before the model was loaded."""
    if subject.used is None:
        raise NotApplicable("the short training did not run to its end")
    shown = f"{subject.used / 1e9:.2f} GB at the peak of the short training, {subject.room / 1e9:.1f} GB were free"
    if subject.used > TIGHT * subject.room:
        raise LuthierError(
            "hardly any memory is left over",
            where="data.batch",
            given=shown,
            do="lower data.batch, set train.gradient_checkpointing, or see `luthier estimate` for what fits",
        )
    return None, shown


def time(subject: Subject) -> tuple[None, str]:
    """How long the whole training takes, as the largest batch took."""
    assert subject.seconds is not None
    assert subject.plan is not None
    seconds = subject.seconds * subject.plan.total / subject.plan.ranks
    return None, f"about {duration(seconds)} at most, without evaluation"


def disk(subject: Subject, size: int | None) -> tuple[None, str]:
    """Room for all checkpoints that are kept and the one that is being written.

    Args:
        subject: the recipe and its model.
        size: bytes of `model/` in a checkpoint, if they are known.
    """
    assert subject.task is not None
    recipe = subject.recipe
    needed = estimate(subject.task, size) * (recipe.checkpoint.keep_last + 2)
    with beside(recipe) as folder:
        free = shutil.disk_usage(folder).free
    shown = f"{needed / 1e9:.2f} GB needed ({recipe.checkpoint.keep_last + 2} checkpoints), {free / 1e9:.1f} GB free"
    if free < needed:
        raise LuthierError(
            "not enough room for the checkpoints",
            where="output",
            given=shown,
            do="free some space, set output elsewhere, or keep fewer: checkpoint.keep_last",
        )
    return None, shown
