"""Can the run be repeated: do versions, code and draws say all that it depends on?"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from .. import record
from ..errors import LuthierError
from ..evaluation.run import autocast
from ..seeding import seed_batch
from .checklist import NotApplicable
from .data import same
from .subject import Subject


def versions() -> tuple[None, str]:
    """What is installed is what the toolkit asks for."""
    wrong = []
    for text in requires("luthier") or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            found = "not installed"
        if found == "not installed" or not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name}{wanted.specifier}: {found}")
    if wrong:
        raise LuthierError(
            "packages are not of the versions that were tested",
            given="; ".join(wrong),
            do="install luthier anew, with constraints.txt for the versions that were tested",
        )
    known = record.versions()
    return None, ", ".join(f"{name} {known[name]}" for name in ("python", "torch", "lightning") if name in known)


def code() -> tuple[None, str]:
    """The commit that is recorded with the run."""
    found = record.git(Path.cwd())
    if found is None:
        raise NotApplicable("this folder is in no git repository", "keep recipes and own code in one")
    dirty = "; changes that are not committed are recorded as such only" if found["dirty"] else ""
    return None, f"git {found['commit'][:12]}{dirty}"


def draws(subject: Subject) -> tuple[None, str]:
    """The same seed gives the same batch and, on a CPU, the same loss to the last bit."""
    task, plan = subject.task, subject.plan
    assert task is not None
    assert plan is not None
    first = next(plan.batches())
    one, other = subject.batch(first), subject.batch(first)
    if not same(one.data, other.data):
        raise LuthierError(
            "the same seed gives another batch",
            where="data",
            given=f"batch {first.number}, made twice",
            do="draw only from the generator that `encode` and `collate` are given",
        )
    losses = []
    for batch in (one, other):
        seed_batch(subject.recipe.train.seed, first.number)
        with torch.no_grad(), autocast(subject.recipe.train.precision, task.device):
            losses.append(float(task.loss(batch.data).sum))
    apart = abs(losses[0] - losses[1]) / (abs(losses[0]) or 1.0)
    if not apart <= (0.0 if task.device.type == "cpu" else 1e-3):
        raise LuthierError(
            "the same seed gives another loss", where="train.seed", given=f"{losses[0]!r} and {losses[1]!r}",
            do="draw only from torch's, numpy's and Python's own generators",
        )  # fmt: skip
    return None, f"seed {subject.recipe.train.seed} gives the same batch and the same loss again"
