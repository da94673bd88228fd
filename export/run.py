"""`luthier export`: a checkpoint becomes an artifact, and is compared with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..common import kinds
from ..common.checkpoint import directory
from ..common.console import console, progress
from ..common.data.collect import Collected
from ..common.data.plan import Planned
from ..common.data.processing import PlannedData
from ..common.errors import ExportError, RecipeError
from ..common.evaluation.run import evaluate, spread
from ..common.evaluation.saved import CHANGEABLE
from ..common.exportable import Exportable, Output
from ..common.reading import load
from ..common.recipe import Recipe
from ..common.record import write_json
from ..common.task import Task
from ..common.training import data
from ..common.training.after_step import deciding_metric
from ..common.training.run import set_threads
from . import artifact, card, formats, parity
from .source import Source

SETS = ("validation", "test", "train")
PACKAGES = {"nemo": "nemo-toolkit"}
"""Names of packages that are not those of the library."""


def export(
    checkpoint: Path,
    format: str,
    output: Path,
    overrides: Sequence[str] = (),
    dtype: str | None = None,
    inputs: int = 16,
) -> Path:
    """Write an artifact and compare it with the model that was trained.

    Args:
        checkpoint: a whole checkpoint.
        format: its format, such as `merged` or `onnx`.
        output: folder to be made.
        overrides: `key=value` changes of the evaluation's data and settings.
        dtype: number format; None: that of the training where the format has it.
        inputs: examples whose outputs are compared.

    Returns:
        The artifact's folder.

    Raises:
        ExportError: there is no such format, or the artifact differs from the model by more than its format allows; it
            is then renamed to `OUTPUT.unusable`.
    """
    checkpoint = Path(os.path.realpath(checkpoint))
    directory.verify(checkpoint)
    artifact.refuse(output)
    for text in overrides:
        if not text.startswith(tuple(f"{key}{end}" for key in CHANGEABLE for end in (".", "="))):
            raise RecipeError("an export can't change this", given=text, expected=f"keys of {', '.join(CHANGEABLE)}")
    saved = load(checkpoint / "recipe.yaml")
    recipe = load(checkpoint / "recipe.yaml", [*overrides, "train.precision='32'", "train.accelerator=cpu"])
    kind = kinds.task(recipe.task.kind)
    set_threads(recipe)
    task = kind(recipe, checkpoint / "model").eval()
    exportable = task.exportable()
    target = formats.find(format, exportable.form)
    number = formats.chosen(target, dtype, saved.train.precision)
    module = target.load()
    label, collected = _inputs(recipe, task)
    expected, before = _asked(exportable, exportable.trained(), collected, recipe, inputs, "the trained model")
    with artifact.partial(output) as folder, artifact.partial(output.with_name(output.name + ".whole")) as whole:
        if module.needs_whole:
            exportable.save(whole)
        source = Source(exportable, checkpoint / "model", whole if module.needs_whole else None)
        console.print(f"writing {format} ({number})", highlight=False)
        module.write(source, folder, number)
        runner = module.runner(source, folder, number)
        found, after = _asked(exportable, runner, collected, recipe, inputs, "the artifact")
        report = parity.Report(
            format, number, runtimes(target, exportable.library), label, parity.compare(expected, found), before, after,
            kind.metrics_of(recipe), deciding_metric(recipe, kind)[0],
        )  # fmt: skip
        return _finish(folder, output, checkpoint, saved, exportable, target, report)


def _finish(
    folder: Path,
    output: Path,
    checkpoint: Path,
    recipe: Recipe,
    exportable: Exportable,
    target: formats.Target,
    report: parity.Report,
) -> Path:
    facts = report.as_dict()
    write_json(folder / artifact.PARITY, facts)
    text = card.card(checkpoint, recipe, exportable, target, facts)
    (folder / artifact.CARD).write_text(text, encoding="utf-8")
    made_of = {"kind": recipe.task.kind, "form": exportable.form, "format": target.format, "dtype": report.dtype}
    artifact.seal(folder, {**made_of, **card.origin(checkpoint, recipe)})
    parity.show(report)
    if faults := report.faults():
        aside = artifact.set_aside(folder, output)
        raise ExportError(
            "the artifact is not the model that was trained",
            where=aside,
            given="; ".join(faults),
            do="use another --dtype or format; the folder is kept for a look, under this name",
        )
    place = artifact.publish(folder, output)
    console.print(f"artifact: {place}\nserve ({target.runtime}):", highlight=False)
    console.print(target.serve.format(path=place), highlight=False, markup=False)
    return place


def _inputs(recipe: Recipe, task: Task) -> tuple[str, Collected]:
    """The first evaluation set that there is."""
    for name in SETS:
        collected = data.gather(recipe, task.processing, name)
        if collected is not None and collected.examples:
            return name, collected
    raise RecipeError("the recipe names no data", where="data.validation", do="add data.validation=FILE")


def _asked(
    exportable: Exportable, runner: Any, collected: Collected, recipe: Recipe, inputs: int, whom: str
) -> tuple[list[Output], dict[str, float]]:
    """(what a runner makes of some inputs, its metrics on the whole set)."""
    task = exportable.task
    batches = PlannedData(task.processing, collected.examples, None)
    outputs: list[Output] = []
    with progress(f"asking {whom}", "inputs") as show, torch.no_grad():
        chosen = spread(len(collected.examples), inputs)
        for done, index in enumerate(chosen, 1):
            batch = batches[Planned(-done, 0, (index,))]
            if batch.data is not None:
                outputs += exportable.outputs(runner, batch.data)
            show(done, len(chosen))
    with _in_place(exportable, runner), progress(f"evaluating {whom}", "batches") as show:
        limit = recipe.evaluate.limit
        found = evaluate(task, collected, recipe, limit=limit, benchmarks=False, progress=show)
    return outputs, parity.flat(found.metrics, type(task).metrics_of(recipe))


@contextmanager
def _in_place(exportable: Exportable, runner: Any) -> Iterator[None]:
    """A context in which a task's predictions are those of a runner."""
    given = vars(exportable.task)
    given["predict"] = lambda batch: exportable.predict(runner, batch)
    try:
        yield
    finally:
        del given["predict"]


def runtimes(target: formats.Target, library: str) -> str:
    """The packages that ran an artifact, with their versions.

    Args:
        target: the format.
        library: what loads the model itself.
    """
    own = (PACKAGES.get(library, library), *(("peft",) if target.format == "adapter" else ()))
    found = []
    for package in target.needs or own:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(package)
    return ", ".join(found)
