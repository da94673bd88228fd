"""`luthier check`: everything that can be known before paying for a run, each with pass or fail and the reason."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table

from . import kinds, strategies
from .checkpoint.save import estimate
from .console import console, duration
from .data.collect import Collected
from .data.plan import Plan, Planned
from .data.processing import Batch, PlannedData
from .errors import LuthierError
from .evaluation.run import autocast
from .evaluation.saved import device
from .recipe import Recipe
from .seeding import seed_everything
from .task import Task
from .training import data
from .training.after_step import deciding_metric
from .training.run import set_threads


@dataclass
class Checklist:
    """Results so far; a check that another one needs is left out when that one failed."""

    rows: list[tuple[str, bool, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(passed for _, passed, _ in self.rows)

    def run(self, name: str, step: Callable[[], tuple[Any, str]]) -> Any:
        """Run one check; `step` gives (result, what to show) or raises. None after a failure."""
        try:
            result, shown = step()
        except LuthierError as error:
            self.rows.append((name, False, str(error)))
            return None
        self.rows.append((name, True, shown))
        return result

    def show(self) -> None:
        table = Table("check", "", "found", show_lines=False)
        for name, passed, shown in self.rows:
            table.add_row(name, "[green]pass[/green]" if passed else "[red]fail[/red]", shown)
        console.print(table)


def check(recipe: Recipe, fast: bool = False) -> bool:
    """Run all checks of a recipe and print them; True if all passed. Writes nothing that stays."""
    results = Checklist()
    results.rows.append(("recipe", True, recipe.task.kind))
    set_threads(recipe)
    kind = results.run("task", lambda: (kinds.task(recipe.task.kind), "its libraries are installed"))
    if kind is not None:
        _check_kind(recipe, kind, results, fast)
    results.show()
    return results.passed


def _check_kind(recipe: Recipe, kind: type[Task], results: Checklist, fast: bool) -> None:
    results.run("best metric", lambda: _best(recipe, kind))
    results.run("strategy", lambda: _strategy(recipe))
    processing = results.run("tokenizer and settings", lambda: (kind.make_processing(recipe), "loaded"))
    if processing is None:
        return
    sets: dict[str, Collected | None] = {}
    for name in ("train", "validation", "regression", "test"):
        if getattr(recipe.data, name):
            sets[name] = results.run(f"data.{name}", partial(_counted, recipe, processing, name))
    train = sets.get("train")
    if train is None:
        return
    plan = results.run("batches", lambda: _planned(recipe, train, processing))
    seed_everything(recipe.train.seed)
    task = results.run("model", lambda: _loaded(recipe, kind))
    if plan is None or task is None:
        return
    seconds = results.run("one step on the largest batch", lambda: _step(recipe, task, train, plan))
    if seconds is not None:
        results.run(
            "time", lambda: (None, f"about {duration(seconds * plan.total / plan.ranks)} at most, without evaluation")
        )
    size = None if fast else results.run("saved, reloaded, equal", lambda: _round_trip(recipe, kind, task))
    results.run("disk", lambda: _room(recipe, task, size))


def _strategy(recipe: Recipe) -> tuple[None, str]:
    strategies.refuse(recipe)
    return None, recipe.train.strategy


def _best(recipe: Recipe, kind: type[Task]) -> tuple[None, str]:
    key, mode = deciding_metric(recipe, kind)
    return None, f"{key}, the {mode}imum"


def _counted(recipe: Recipe, processing: Any, name: str) -> tuple[Collected | None, str]:
    collected = data.gather(recipe, processing, name)
    assert collected is not None
    lines = [f"{collected.part}{collected.report.summary()}"]
    lines += [f"  {named[0]}" for named in collected.report.named.values()]
    return collected, "\n".join(lines)


def _planned(recipe: Recipe, train: Collected, processing: Any) -> tuple[Plan, str]:
    plan = data.plan(recipe, train, processing, 1, recipe.train.accumulate)
    real = padded = 0.0
    for batch in plan.batches():
        real, padded = real + plan.costs[list(batch.indices)].sum(), padded + plan.cost(batch)
    return plan, f"{plan.steps} optimizer steps of {plan.per_step} batches; {1 - real / padded:.0%} padding"


def _loaded(recipe: Recipe, kind: type[Task]) -> tuple[Task, str]:
    task = kind(recipe).to(device(recipe))
    strategies.refuse(recipe, task)
    trained = sum(parameter.numel() for parameter in task.parameters() if parameter.requires_grad)
    whole = sum(parameter.numel() for parameter in task.parameters())
    return task, f"{trained / 1e6:.2f} of {whole / 1e6:.2f} million parameters are trained"


def largest(plan: Plan) -> Planned:
    """The batch of the first epoch with the highest cost, padding included."""
    return max((batch for batch in plan.batches() if batch.epoch == 0), key=plan.cost)


def _step(recipe: Recipe, task: Task, train: Collected, plan: Plan) -> tuple[float, str]:
    """Forward and backward of the largest batch, twice (the first one pays for allocation); seconds of the second."""
    batches = PlannedData(task.processing, train.examples, recipe.train.seed)
    task.train_mode()
    planned = largest(plan)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        batch: Batch = batches[planned].to(task.device)
        with autocast(recipe.train.precision, task.device):
            loss = task.loss(batch.data)
        loss.sum.backward()
        gradients = [p.grad for p in task.parameters() if p.grad is not None]
        finite = bool(torch.isfinite(loss.sum)) and all(bool(gradient.isfinite().all()) for gradient in gradients)
        task.zero_grad(set_to_none=True)
        if not finite:
            raise LuthierError("loss or gradient is not finite", given=f"loss {loss.sum.item() / loss.count:.4g}")
        seconds = time.perf_counter() - started
    shown = (
        f"{len(planned.indices)} examples, {batch.padded:.1f} {task.processing.unit} padded; loss "
        f"{loss.sum.item() / loss.count:.4f} over {loss.count:g}; {seconds:.2f} s, {_memory(task.device):.1f} GB"
    )
    return seconds, shown


def _memory(where: torch.device) -> float:
    """GB in use at most (device) or now (CPU process)."""
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where) / 1e9
    return float(psutil.Process().memory_info().rss) / 1e9


def _round_trip(recipe: Recipe, kind: type[Task], task: Task) -> tuple[int, str]:
    with _beside(recipe) as folder:
        task.save_pretrained(folder)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        again = dict(kind(recipe, folder).named_parameters())
        for name, parameter in task.named_parameters():
            if name in again and not torch.equal(parameter.detach().cpu(), again[name].detach()):
                raise LuthierError("a parameter is not the same after saving and loading", where=name)
    return size, f"{size / 1e6:.1f} MB"


@contextmanager
def _beside(recipe: Recipe) -> Iterator[Path]:
    """A temporary folder on the file system of the output."""
    place = Path(recipe.output).expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    with tempfile.TemporaryDirectory(dir=place, prefix=".luthier-check-") as folder:
        yield Path(folder)


def _room(recipe: Recipe, task: Task, model_size: int | None) -> tuple[None, str]:
    """Room for all checkpoints that are kept and the one that is being written."""
    needed = estimate(task, model_size) * (recipe.checkpoint.keep_last + 2)
    with _beside(recipe) as folder:
        free = shutil.disk_usage(folder).free
    shown = f"{needed / 1e9:.2f} GB needed ({recipe.checkpoint.keep_last + 2} checkpoints), {free / 1e9:.1f} GB free"
    if free < needed:
        raise LuthierError("not enough room for the checkpoints", where="output", given=shown)
    return None, shown
