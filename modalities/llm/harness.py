"""Benchmarks of the field at an evaluation: tasks of lm-evaluation-harness, run on the model in memory."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import torch

from ...common.console import console, is_first_rank
from ...common.errors import DataError, RecipeError, missing_extra
from ...common.seeding import seed_everything
from ...common.training.watch import beat
from .config import HarnessSection

WHERE = "evaluate.harness.tasks"


def names(section: HarnessSection | None) -> dict[str, str]:
    """Every metric that the tasks give, and whether its minimum or maximum is better; the tasks' data are fetched.

    Raises:
        LuthierError: the harness is not installed.
        RecipeError: no such task.
        DataError: a task can't be loaded.
    """
    if section is None:
        return {}
    found: dict[str, str] = {}
    loaded = _load(section.tasks)
    for name, task in loaded["tasks"].items():
        for metric, higher in task.higher_is_better().items():
            for each in task._filters:
                found[_key(name, f"{metric},{each.name}")] = "min" if higher is False else "max"
    for name, group in loaded["groups"].items():
        for metric in group.aggregate_metric_list or ():
            for child in group.get_all_tasks():
                filters = metric.filter_list or [each.name for each in child._filters]
                better = "min" if child.higher_is_better().get(metric.metric) is False else "max"
                found |= {_key(name, f"{metric.metric},{each}"): better for each in filters}
    return found


def measure(
    causal: Any, tokenizer: Any, section: HarnessSection, batch: int, precision: str, seed: int
) -> dict[str, float]:
    """The metrics `harness/<task>/<metric>` of all tasks, and of the groups that have some together.

    Args:
        causal: the transformers model, in evaluation mode.
        tokenizer: of the model; a copy of it is used, as the harness changes its settings.
        section: which tasks, and how many of their examples.
        batch: examples in a batch.
        precision: the recipe's.
        seed: of examples shown to the model, and of sampling.
    """
    from lm_eval.evaluator import evaluate

    loaded = _load(section.tasks)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")  # 0 is a wish of the task, which the harness respects too
        if own is None or (own != 0 and section.num_fewshot is not None):
            task.set_config("num_fewshot", section.num_fewshot or 0)
        task.set_fewshot_seed(seed)
    seed_everything(seed)
    lower = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    with _quiet(), _unchanged(causal):
        found = evaluate(
            _in_memory()(causal, tokenizer=deepcopy(tokenizer), batch_size=batch, mixed_precision_dtype=lower),
            loaded,
            limit=section.limit,
            bootstrap_iters=0,
            log_samples=False,
            apply_chat_template=section.chat_template,
        )
    assert found is not None  # of a single process, as this looks to it
    return {
        _key(name, metric): float(value)
        for name, values in found["results"].items()
        for metric, value in values.items()
        if "," in metric and "_stderr," not in metric and isinstance(value, int | float)
    }


def _key(task: str, metric: str) -> str:
    """The harness says `metric,filter`; `none` is the filter of tasks that have no other."""
    return f"harness/{task}/{metric.removesuffix(',none')}"


@cache
def _load(tasks: tuple[str, ...]) -> Mapping[str, Any]:
    """Tasks and groups by name. Those of files only don't need the harness's own to be looked through."""
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "lm_eval", "harness") from error
    with _quiet():
        manager = TaskManager(include_defaults=not all(name.endswith((".yaml", ".yml")) for name in tasks))
        try:
            found: Mapping[str, Any] = manager.load(list(tasks))
        except KeyError as error:
            known = manager.all_tasks
            wrong = next((name for name in tasks if repr(name) in str(error) or f"'{name}'" in str(error)), None)
            if wrong is None or wrong in known:
                raise _unloadable(tasks, error) from error
            near = difflib.get_close_matches(wrong, known, 1, 0.4)
            expected = f"{near[0]!r} perhaps" if near else "a task of the harness, or a YAML file of your own"
            raise RecipeError("the harness has no such task", where=WHERE, given=wrong, expected=expected) from error
        except Exception as error:  # which ones depends on the task and on where its data are
            raise _unloadable(tasks, error) from error
    return found


def _unloadable(tasks: tuple[str, ...], error: Exception) -> DataError:
    problem = f"the tasks can't be loaded: {str(error).strip() or type(error).__name__}"
    return DataError(problem, where=WHERE, given=", ".join(tasks), do="see whether their data can be reached")


@cache
def _in_memory() -> Any:
    """The harness's class of models, that tells when it gets on and shows progress only on a terminal."""
    from lm_eval.models.huggingface import HFLM

    class InMemory(HFLM):  # type: ignore[misc]
        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().loglikelihood(requests, disable_tqdm or not _is_watched())

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().loglikelihood_rolling(requests, disable_tqdm or not _is_watched())

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().generate_until(requests, disable_tqdm or not _is_watched())

        def _model_call(self, *arguments: Any, **options: Any) -> Any:
            beat()
            return super()._model_call(*arguments, **options)

        def _model_generate(self, *arguments: Any, **options: Any) -> Any:
            beat()
            return super()._model_generate(*arguments, **options)

    return InMemory


def _is_watched() -> bool:
    return console.is_terminal and is_first_rank()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's notices; it gives each as a warning of its own."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _unchanged(causal: Any) -> Iterator[None]:
    """The harness ties a model's tables anew, which would undo what an adapter has made of them."""
    causal.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del causal.tie_weights
