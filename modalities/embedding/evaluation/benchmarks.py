"""Benchmarks of the field at an evaluation: tasks of MTEB (arXiv:2210.07316), run on the model in memory."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from ....common.errors import DataError, RecipeError, missing_extra
from ....common.training.watch import beat

WHERE = "evaluate.mteb"


def names(tasks: Sequence[str]) -> dict[str, str]:
    """The metrics that tasks give, `mteb/<task>`: each task's own main score, the larger the better."""
    return {f"mteb/{name}": "max" for name in tasks}


@cache
def load(tasks: tuple[str, ...]) -> Any:
    """The tasks; their data are fetched when they run.

    Raises:
        LuthierError: the package is not installed.
        RecipeError: no such task.
    """
    try:
        import mteb
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "mteb", "mteb") from error
    logging.getLogger("mteb").setLevel(logging.ERROR)
    try:
        return mteb.get_tasks(tasks=list(tasks))
    except KeyError as error:
        known = [task.metadata.name for task in mteb.get_tasks()]
        wrong = next((name for name in tasks if name not in known), tasks[0])
        near = difflib.get_close_matches(wrong, known, 1, 0.4)
        expected = f"{near[0]!r} perhaps" if near else "a task of MTEB"
        raise RecipeError("MTEB has no such task", where=WHERE, given=wrong, expected=expected) from error


def measure(model: Any, tasks: Sequence[Any], batch: int) -> dict[str, float]:
    """The main scores `mteb/<task>`.

    Args:
        model: of sentence-transformers, in evaluation mode.
        tasks: as `load` gives them.
        batch: texts in a batch.

    Raises:
        DataError: a task's data can't be loaded.
    """
    import mteb

    found = {}
    for task in tasks:
        beat()
        name = task.metadata.name
        options: Any = {"batch_size": batch, "show_progress_bar": False}
        try:
            result = mteb.evaluate(model, task, cache=None, encode_kwargs=options, show_progress_bar=False)
        except (OSError, ConnectionError, ValueError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(f"the task can't be run: {first}", where=WHERE, given=name) from error
        found[f"mteb/{name}"] = float(result.task_results[0].get_score())
    return found
