"""Can the metric that decides be computed, and would it be seen if the model forgets?"""

from __future__ import annotations

import math

from ..errors import DataError, LuthierError
from ..evaluation.run import evaluate
from ..recipe import Recipe
from ..task import Task
from ..training.after_step import deciding_metric
from .checklist import NotApplicable
from .subject import Subject

LIMIT = 8
"""Examples that are tried."""


def named(recipe: Recipe, kind: type[Task]) -> tuple[None, str]:
    """The metric is one that the task gives."""
    key, mode = deciding_metric(recipe, kind)
    return None, f"{key}, the {mode}imum"


def computed(subject: Subject) -> tuple[None, str]:
    """Evaluate a few examples: the metric that decides is there, and a number."""
    recipe, collected = subject.recipe, subject.sets.get("validation")
    assert subject.task is not None
    if collected is None:
        raise NotApplicable("without data.validation no metric decides", "add data.validation")
    found = evaluate(subject.task, collected, recipe, limit=LIMIT, benchmarks=False).metrics
    key, _ = deciding_metric(recipe, subject.kind)
    if key not in found and "/" in key:
        raise NotApplicable(f"{key} is given by a benchmark, which is not run here")
    if key not in found:
        raise LuthierError(
            "nothing in the validation data gives the metric that decides",
            where="checkpoint.best",
            given=key,
            expected=f"one of {', '.join(name for name, value in found.items() if isinstance(value, int | float))}",
            do="set checkpoint.best to one of these, or give data.validation what the metric needs",
        )
    if not math.isfinite(float(found[key])):
        if len(collected.examples) > LIMIT:
            raise NotApplicable(f"{key} is no number on {LIMIT} examples: it needs more of them")
        raise DataError(
            "the metric that decides is no number on the validation data",
            where="data.validation",
            given=f"{key} = {found[key]}",
            do="give it examples that the metric can judge",
        )
    return None, f"{key} = {float(found[key]):.4f} on {min(LIMIT, len(collected.examples))} examples"


def regression(subject: Subject) -> tuple[None, str]:
    """Whether there is data, or a benchmark, of what the model is not to forget."""
    evaluation = subject.recipe.evaluate
    benchmarks = [name for name in ("harness", "mteb") if getattr(evaluation, name, None)]
    if "regression" in subject.sets:
        return None, f"data.regression: {len(subject.sets['regression'].examples)} examples at each evaluation"
    if benchmarks:
        return None, f"evaluate.{benchmarks[0]} at each evaluation"
    raise NotApplicable(
        "nothing is measured of what the model could before",
        "add data.regression: examples of what it is not to forget, evaluated along with data.validation",
    )
