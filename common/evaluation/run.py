"""Run a task over an evaluation set: predictions of all examples, metrics of the whole set, a few samples to read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..data.collect import Collected
from ..data.plan import Bounds, Planned, cut
from ..data.processing import PlannedData, loader
from ..recipe import Recipe
from ..task import LossSum, Task
from .each import Each

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name (slices nested), samples for reading, and what each example adds to the metrics, if known."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]
    each: list[Each] = field(default_factory=list)


def beside(first: Evaluation, name: str, other: Evaluation) -> Evaluation:
    """Two evaluations as one: metrics and slices of the other go under `name/`, its samples after the first's."""
    metrics = {**first.metrics, **{f"{name}/{key}": value for key, value in other.metrics.items() if key != "slices"}}
    slices = {f"{name}/{field}": parts for field, parts in other.metrics.get("slices", {}).items()}
    if slices:
        metrics["slices"] = {**first.metrics.get("slices", {}), **slices}
    samples = [*first.samples, *({"suite": name, **sample} for sample in other.samples)]
    return Evaluation(metrics, samples, [*first.each, *(one.named(name) for one in other.each)])


def spread(number: int, limit: int | None) -> list[int]:
    """Indices of at most `limit` of `number` examples, evenly spread, always the same."""
    if limit is None or limit >= number:
        return list(range(number))
    return [int(i) for i in np.linspace(0, number - 1, limit).round()]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a recipe's precision computes."""
    if precision == "bf16-mixed":
        return torch.autocast(device.type, torch.bfloat16)
    if precision == "16-mixed":
        return torch.autocast(device.type, torch.float16)
    return nullcontext()


def evaluate(
    task: Task,
    collected: Collected,
    recipe: Recipe,
    *,
    limit: int | None = None,
    workers: int = 0,
    benchmarks: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a task; the modes of its modules are afterwards as they were before.

    Args:
        task: the model, on its device.
        collected: the checked evaluation set.
        recipe: evaluation settings and precision.
        limit: most examples; None: all.
        workers: data processes.
        benchmarks: whether the metrics of `Task.measure` are wanted too.
        progress: called with (batches done, batches).

    Returns:
        On every rank the same metrics, of the whole set: each example counts once, whatever the batch size.
    """
    modes = {module: module.training for module in task.modules()}
    task.eval()
    try:
        task.before_evaluation()
        with torch.no_grad(), task.gathered(), autocast(recipe.train.precision, task.device):
            records, loss = _predict(task, collected, recipe, limit, workers, progress)
            further = task.measure() if benchmarks else {}
    finally:
        for module, mode in modes.items():
            module.training = mode
    metrics = task.score(records)
    if loss.count:
        metrics["loss"] = float(loss.sum) / loss.count
    return Evaluation({**metrics, **further}, task.samples(records, recipe.evaluate.samples), task.each(records))


def _predict(
    task: Task,
    collected: Collected,
    recipe: Recipe,
    limit: int | None,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[Any], LossSum]:
    costs = np.asarray([task.processing.cost(example) for example in collected.examples])
    chosen = np.asarray(spread(len(costs), limit))
    groups = np.asarray([task.processing.group(example) for example in collected.examples])
    order = chosen[np.lexsort((costs[chosen], groups[chosen]))]
    parts = [order[groups[order] == group] for group in np.unique(groups[order])]
    batches = [batch for part in parts for batch in cut(part, costs, Bounds(recipe.evaluate.batch))]
    plan = [Planned(i, 0, batch) for i, batch in enumerate(batches)]
    rank, ranks = task.data_rank
    data = PlannedData(task.processing, collected.examples, None)
    mine = plan[rank::ranks]
    found: list[tuple[int, Any]] = []
    total, count = 0.0, 0.0
    for done, batch in enumerate(loader(data, mine, workers), 1):
        for error in batch.bad:
            if recipe.data.on_bad == "raise":
                raise error
            log.warning("left out of the evaluation: %s", error)
        if batch.data is None:
            continue
        predicted = task.predict(batch.to(task.device))
        found += zip(batch.indices, predicted.records, strict=True)
        if predicted.loss is not None:
            total, count = total + float(predicted.loss.sum), count + predicted.loss.count
        if progress:
            progress(done, len(mine))
    if ranks > 1:
        world = torch.distributed.get_world_size()
        told: list[Any] = [None] * world
        torch.distributed.all_gather_object(told, (found, total, count))
        told = told[:: world // ranks]  # ranks that share layers had the same batches
        found = [pair for part in told for pair in part[0]]
        total, count = sum(part[1] for part in told), sum(part[2] for part in told)
    found.sort(key=lambda pair: pair[0])
    return [record for _, record in found], LossSum(torch.tensor(total), count)
