"""`luthier verify-resume`: the proof, for the user's own recipe on the user's own machine."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path

from rich.table import Column, Table

from .. import kinds
from ..console import console, duration
from ..errors import LuthierError, RecipeError
from ..reading import find, load, shipped
from ..recipe import Recipe, Source
from .compare import checkpoints_differ, curves_differ
from .rounds import SAVING, SIGNALS, STARTING, TRAINING, Interruption, Reference, Report, Rounds

WAYS = (SAVING, TRAINING, "SIGTERM", SAVING, TRAINING, "SIGUSR1", SAVING, STARTING, "SIGINT", SAVING)
"""How the run is interrupted: as many of these, from the first on, as are asked for, and then over again."""
NOISE = 2.0
"""On an accelerator, where sums may be taken in any order: tolerance over the difference of two uninterrupted runs."""


def verify(name: str, overrides: Sequence[str], kills: int, steps: int) -> bool:
    """Interrupt short runs of a recipe, let each go on, compare and print; True if all is equal.

    Args:
        name: a file, or the name of a recipe that ships.
        overrides: `key=value` texts.
        kills: number of interruptions.
        steps: optimizer steps of a run.
    """
    recipe = short(name, overrides, steps)
    place = _place(recipe)
    try:
        report = _verify(recipe, place, kills)
    except LuthierError:
        console.print(f"what was run is left in {place}", highlight=False)
        raise
    except BaseException:
        shutil.rmtree(place)
        raise
    show(report)
    if report.unequal:
        console.print(f"what was run is left in {place}", highlight=False)
    else:
        shutil.rmtree(place)
    return not report.unequal


def short(name: str, overrides: Sequence[str], steps: int) -> Recipe:
    """The recipe with few steps, each of them logged, a few saves, and two small evaluations if it has any."""
    recipe = load(name, overrides)
    if _prepared(name, recipe):
        recipe = load(name, overrides)
    if recipe.train.nodes > 1:
        raise RecipeError("runs of one machine only are verified", where="train.nodes", given=recipe.train.nodes)
    every = max(1, steps // 4)
    changes = [
        "train.epochs=null", f"train.steps={steps}", "train.log_every=1", "train.fresh=false", "track.loggers=[csv]",
        f"checkpoint.every={every}", "checkpoint.keep_last=2", "evaluate.at_start=false", "evaluate.patience=null",
        f"evaluate.limit={min(4, recipe.evaluate.limit or 4)}",
    ]  # fmt: skip
    if recipe.evaluate.every != "never":
        changes.append(f"evaluate.every={max(1, steps // 2)}")
    return load(name, [*overrides, *changes])


def _prepared(name: str, recipe: Recipe) -> bool:
    """Make what a recipe that ships needs, if it is missing and the recipe has a way: `llm/arithmetic-sft` has
    `prepare` in `modalities/llm/arithmetic/prepare.py` (without what follows a dash), which makes what the recipe names
    when it is called without arguments."""
    known = {file.resolve(): key for key, file in shipped().items()}
    key = known.get(find(name).resolve(), "").partition("-")[0]
    sources: list[Source] = [*recipe.data.train, *recipe.data.validation]
    missing = [path for path in (recipe.model.path, *(source.path for source in sources)) if not Path(path).exists()]
    if not key or not missing or not (Path(kinds.__file__).parent.parent / "modalities" / key / "prepare.py").is_file():
        return False
    console.print(f"{missing[0]} is missing: making what the recipe needs", highlight=False)
    import_module(f"{kinds.PACKAGE}.modalities.{key.replace('/', '.')}.prepare").prepare()
    return True


def _place(recipe: Recipe) -> Path:
    """A new folder beside the output, or above where that will be."""
    place = Path(recipe.output).expanduser().absolute().parent
    while not place.is_dir():
        place = place.parent
    return Path(tempfile.mkdtemp(dir=place, prefix=".luthier-verify-"))


def _verify(recipe: Recipe, place: Path, kills: int) -> Report:
    from .. import strategies

    rounds = Rounds(recipe, place, forked=strategies.devices(recipe.train) == 1 and _exact(recipe))
    console.print(f"running {rounds.steps} steps without interruption", highlight=False)
    reference = rounds.alone()
    console.print(
        f"it took {duration(reference.whole)}, a save {reference.save:.2f} s; now interrupting {kills} times",
        highlight=False,
    )
    if not _exact(recipe):
        rounds.report.tolerance = NOISE * _noise(rounds, reference)
    rounds.interrupt(reference, Counter(islice(cycle(WAYS), kills)))
    return rounds.report


def _exact(recipe: Recipe) -> bool:
    """Whether the device repeats a computation to the last bit."""
    import torch

    return recipe.train.accelerator == "cpu" or not torch.accelerator.is_available()


def _noise(rounds: Rounds, reference: Reference) -> float:
    """Largest difference between two uninterrupted runs."""
    again = rounds.alone("repeated").folder
    paths = [folder / "checkpoints" / "last" for folder in (reference.folder, again)]
    found = curves_differ(reference.folder, again) + checkpoints_differ(*paths)
    return max((difference.size for difference in found), default=0.0)


def show(report: Report) -> None:
    """Print what was found."""
    table = Table(Column("interruption", no_wrap=True), "times", "after step", "went on from", "largest difference")
    for way in (SAVING, TRAINING, STARTING, *SIGNALS):
        those = [each for each in report.interruptions if each.way == way]
        if those:
            table.add_row(way, str(len(those)), *_row(those))
    console.print(table)
    runs = f"{report.runs} run{'s' if report.runs > 1 else ''} of {report.steps} steps"
    what = f"{runs}, interrupted {len(report.interruptions)} times"
    if report.unequal:
        first = report.unequal[0]
        console.print(f"[red]not equal[/red]: {what}; the first of {len(report.unequal)} differences: {first}")
    elif report.tolerance or report.differences:
        console.print(
            f"[green]equal[/green] within {report.tolerance:.2g} of the largest magnitude, {NOISE:g} times what "
            f"uninterrupted runs differ by on this device: {what}",
            highlight=False,
        )
    else:
        console.print(
            f"[green]equal[/green] to the last bit in losses, weights, optimizer and counters: {what}", highlight=False
        )


def _row(those: list[Interruption]) -> tuple[str, str, str]:
    largest = max(each.largest for each in those)
    return (
        ", ".join(str(each.step) for each in those),
        ", ".join(str(each.resumed) if each.resumed else "start" for each in those),
        f"{largest:.2g}" if largest else "none",
    )
