"""Is a saved checkpoint equal, and does a run go on as if it had never stopped?"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from ..checkpoint import directory
from ..console import console
from ..data.collect import Collected
from ..data.stream import Streamed
from ..errors import CheckpointError, LuthierError
from ..recipe import Recipe
from ..task import Task
from ..training.output import CHECKPOINTS
from ..training.run import train
from ..verify import compare
from .checklist import NotApplicable
from .subject import Subject, beside

STEPS = 4
"""Optimizer steps of a run that is stopped half way."""
NOISE = 1e-3
"""On an accelerator sums are taken in any order: largest difference that still counts as equal."""


def reloaded(subject: Subject, folder: Path) -> tuple[Task, str]:
    """Save the model as it is after the short training, load it again and compare every parameter."""
    task = subject.task
    assert task is not None
    task.save_pretrained(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    again = subject.kind(subject.recipe, folder)
    loaded = dict(again.named_parameters())
    trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
    if missing := [name for name in trained if name not in loaded]:
        raise CheckpointError("a trained parameter is not there after saving and loading", where=missing[0])
    for name, parameter in task.named_parameters():
        if ".original_module." in name:  # what PEFT trains a copy of; a new head is drawn anew, and is not used
            continue
        if name in loaded and not torch.equal(parameter.detach().cpu(), loaded[name].detach()):
            raise CheckpointError("a parameter is not the same after saving and loading", where=name)
    return again, f"{size / 1e6:.1f} MB"


def short(recipe: Recipe, output: Path, steps: int, **train: object) -> Recipe:
    """A run of a few steps without evaluation, each step of it logged."""
    changes = {"epochs": None, "steps": steps, "log_every": 1, "fresh": False, "debug": None, "requeue": False, **train}
    parts = {
        "train": recipe.train.model_copy(update=changes),
        "data": recipe.data.model_copy(update={"validation": (), "regression": (), "test": (), "workers": 0}),
        "evaluate": recipe.evaluate.model_copy(update={"every": "never", "at_start": False, "patience": None}),
        "checkpoint": recipe.checkpoint.model_copy(update={"every": max(1, steps // 2), "keep_last": 2}),
        "track": recipe.track.model_copy(update={"loggers": ("csv",)}),
    }
    return recipe.model_copy(update={**parts, "output": str(output)})


def few(subject: Subject, steps: int) -> dict[str, Collected | None] | None:
    """The examples of a few steps, so that nothing is read or computed ahead for all; None: a stream, read as it is."""
    given, plan = subject.given, subject.plan
    assert plan is not None
    if isinstance(given, Streamed):
        return None
    wanted: set[int] = set()
    for number, batch in enumerate(plan.batches()):
        if number >= steps * plan.per_step:
            break
        wanted |= set(batch.indices)
    chosen = sorted(wanted)
    part = Collected(
        [given.examples[at] for at in chosen], [given.weights[at] for at in chosen], given.report, given.part
    )
    return {"train": part, "validation": None, "regression": None}


def resumed(subject: Subject) -> tuple[None, str]:
    """Train a few steps at a stretch, and again with a stop half way, and compare all that is left."""
    recipe = subject.recipe
    if recipe.train.nodes > 1:
        raise NotApplicable("a run on several machines", "run `luthier verify-resume` there")
    with beside(recipe) as place:
        whole, stopped = place / "whole", place / "stopped"
        alone = {"devices": 1, "strategy": "auto", "tensor_parallel": None}
        quietly(short(recipe, whole, STEPS, **alone), few(subject, STEPS))
        shutil.copytree(whole, stopped, symlinks=True)
        shutil.rmtree(stopped / CHECKPOINTS / directory.name(STEPS))
        quietly(short(recipe, stopped, STEPS, **alone), few(subject, STEPS))
        last = [folder / CHECKPOINTS / directory.name(STEPS) for folder in (whole, stopped)]
        found = compare.curves_differ(whole, stopped) + compare.checkpoints_differ(*last)
    bound = NOISE if torch.cuda.is_available() and recipe.train.accelerator != "cpu" else 0.0
    differing = [difference for difference in found if difference.size > bound]
    if differing:
        raise CheckpointError(
            "a run that stops and goes on is not the run that never stopped",
            given=f"{len(differing)} differences, such as {differing[0]}",
            do="run `luthier verify-resume`, which says where they part",
        )
    equal = "equal to the last bit" if not found else f"equal within {bound:g}"
    return None, f"stopped after {STEPS // 2} of {STEPS} steps and gone on: losses, weights and optimizer are {equal}"


def quietly(recipe: Recipe, sets: dict[str, Collected | None] | None) -> Path:
    """Run a recipe without a word. Raises LuthierError if it was stopped by a signal."""
    before, console.quiet = console.quiet, True
    try:
        outcome = train(recipe, sets=sets)
    finally:
        console.quiet = before
    if outcome.stopped_by:
        raise LuthierError("the check was stopped by a signal", given=outcome.stopped_by)
    return outcome.folder
