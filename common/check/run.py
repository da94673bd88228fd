"""The questions in the order in which they can be asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from .. import kinds, record
from ..recipe import Recipe
from ..training.run import set_threads
from . import cost, data, devices, environment, export, licenses, metric, model, saving, training
from .checklist import Checklist, NotApplicable
from .subject import Subject, beside


def check(recipe: Recipe, fast: bool = False, file: Path | None = None) -> bool:
    """Ask all questions about a recipe and print the answers. Writes nothing that stays, but `file`.

    Args:
        recipe: the resolved recipe.
        fast: leave out what trains or loads the model once more: resuming, two devices, merging.
        file: where the answers go as JSON.

    Returns:
        Whether nothing failed.
    """
    answers = Checklist()
    answers.ask("model", "recipe", lambda: (recipe, recipe.task.kind))
    set_threads(recipe)
    kind = answers.ask("model", "task", lambda: (kinds.task(recipe.task.kind), "its libraries are installed"))
    if kind is not None:
        answers.ask("metric", "best metric", lambda: metric.named(recipe, kind))
        subject = Subject(recipe, kind)
        works = answers.ask("model", "strategy", lambda: model.strategy(recipe))
        _examine(subject, answers, fast)
        if works and subject.task is not None and recipe.train.strategy not in ("auto", "ddp"):
            answers.ask("model", "strategy with this model", lambda: model.strategy(recipe, subject.task))
    answers.ask("export", "licenses", lambda: licenses.permitted(recipe))
    answers.ask("environment", "versions", environment.versions)
    answers.ask("environment", "code", environment.code)
    answers.finish()
    answers.show()
    if file is not None:
        facts: dict[str, Any] = {"kind": recipe.task.kind, "fast": fast, **answers.as_dict()}
        record.write_json(file, {**facts, "versions": record.versions(), "recipe": recipe.model_dump(mode="json")})
    return answers.passed


def _examine(subject: Subject, answers: Checklist, fast: bool) -> None:
    recipe, kind = subject.recipe, subject.kind
    ask = answers.ask
    subject.processing = ask("model", "tokenizer and settings", lambda: (kind.make_processing(recipe), "loaded"))
    if subject.processing is None:
        return
    for name in data.SETS:
        if name == "train" or getattr(recipe.data, name):
            ask("data", f"data.{name}", partial(data.counted, subject, name))
    ask("regression", "regression", lambda: metric.regression(subject))
    if "train" not in subject.sets:
        return
    ask("data", "apart", lambda: data.apart(subject))
    ask("data", "as a whole", lambda: data.doubts(subject))
    ask("data", "batches", lambda: data.planned(subject))
    if subject.plan is not None:
        ask("data", "what carries loss", lambda: data.carries(subject))
    if ask("model", "room for the weights", lambda: (True, model.fits(subject)[1])) is None:
        return
    ask("model", "model", lambda: model.load(subject))
    if subject.task is not None and subject.plan is not None:
        _train(subject, answers, fast)


def _train(subject: Subject, answers: Checklist, fast: bool) -> None:
    ask = answers.ask
    ask("training", "one step on the largest batch", lambda: training.one_step(subject))
    if subject.seconds is None:
        return
    ask("environment", "draws", lambda: environment.draws(subject))
    ask("training", "one batch, repeated", lambda: training.repeated(subject))
    ask("cost", "memory", lambda: cost.memory(subject))
    ask("cost", "time", lambda: cost.time(subject))
    ask("metric", "evaluated", lambda: metric.computed(subject))
    with beside(subject.recipe) as place:
        again = ask("resume", "saved, reloaded, equal", lambda: saving.reloaded(subject, place / "model"))
        size = sum(file.stat().st_size for file in (place / "model").rglob("*") if file.is_file()) or None
        ask("cost", "disk", lambda: cost.disk(subject, size))
        if again is not None:
            found = ask("export", "form", lambda: export.exportable(subject, again))
            if found is not None:
                _slow(ask, "export", "merged", fast, lambda: export.merged(subject, found, place / "merged"))
    _slow(ask, "resume", "resumed", fast, lambda: saving.resumed(subject))
    _slow(ask, "devices", "two devices", fast, lambda: devices.equal(subject))


def _slow(ask: Any, question: str, name: str, fast: bool, step: Any) -> None:
    """Ask what takes long, or say that it was left out."""

    def left_out() -> tuple[None, str]:
        raise NotApplicable("left out by --fast", "leave --fast away before the run itself")

    ask(question, name, left_out if fast else step)
