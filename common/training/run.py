"""`luthier train`: from a recipe to a finished run, resuming by itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from .. import kinds, record, strategies
from ..checkpoint.position import Position
from ..checkpoint.save import Saver
from ..checkpoint.state import FILE, TensorIO
from ..console import console, duration, is_first_rank, progress, quiet_lightning
from ..data.collect import Collected
from ..data.processing import PlannedData, PlanSampler, Schedule, loader
from ..data.stream import Streamed, StreamPlan
from ..errors import CheckpointError
from ..evaluation.run import Evaluation, beside, evaluate
from ..inspect.terminal import glance
from ..recipe import Recipe
from ..seeding import seed_everything
from ..task import Task
from ..trackers import choose
from . import data, speed
from .after_step import AfterStep, deciding_metric
from .inside import Inside
from .output import Output, opened, settled
from .progress import ProgressLine
from .ranks import join
from .signals import requeue
from .spikes import WrongSteps
from .watch import Watch, beat, mark

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a training ended with: its folder, the best metrics, and the signal that stopped it (0: it finished)."""

    folder: Path
    metrics: dict[str, Any]
    stopped_by: int = 0


def train(
    recipe: Recipe, callbacks: Sequence[Callback] = (), sets: dict[str, Collected | None] | None = None
) -> Outcome:
    """Run a recipe to its end, from the newest whole checkpoint in its output if there is one.

    Args:
        recipe: the resolved recipe.
        callbacks: further Lightning callbacks; they see each step after the run's own.
        sets: the recipe's data sets by name, if they have been read already, or parts of them.
    """
    quiet_lightning()
    kind = kinds.task(recipe.task.kind)
    deciding_metric(recipe, kind)
    speed.refuse(recipe.track.estimate, Path(recipe.output).expanduser())
    strategies.refuse(recipe)
    set_threads(recipe)
    processing = kind.make_processing(recipe)
    names = ("train", "validation", "regression")
    if sets is None:
        sets = {name: data.gather(recipe, processing, name) for name in names}
    sets = {name: sets.get(name) for name in names}
    seed_everything(recipe.train.seed)
    task = kind(recipe)
    strategies.refuse(recipe, task)
    if recipe.train.compile:
        task.compile_parts()
    early = Trainer(**_machine(recipe), logger=False, enable_checkpointing=False)
    join(early, recipe.train.timeout)
    ranks = early.world_size // (recipe.train.tensor_parallel or 1)
    plan = data.schedule(recipe, _given(sets), processing, ranks, ranks * recipe.train.accumulate)
    with opened(recipe) as output:  # only now, when nothing in the recipe can be wrong any more, is anything written
        before = output.position()
        if before and (before["per_step"] != plan.per_step or recipe.data.streaming):
            per_step = _shareable(before["per_step"], ranks, plan.per_step)
            plan = data.schedule(recipe, _given(sets), processing, ranks, per_step, before.get("stream"))
        with Watch(output, early.global_rank, early.world_size, recipe.train.timeout) as watch:
            return _train(settled(recipe, output.folder), task, plan, output, sets, [*callbacks, watch])


def _given(sets: dict[str, Collected | None]) -> Collected:
    train_set = sets["train"]
    assert train_set is not None  # the recipe requires it
    return train_set


def set_threads(recipe: Recipe) -> None:
    """torch's CPU threads, if the recipe says."""
    import torch

    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)


def _train(
    recipe: Recipe,
    task: Task,
    plan: Schedule,
    output: Output,
    sets: dict[str, Collected | None],
    callbacks: Sequence[Callback],
) -> Outcome:
    task.total_steps = plan.steps
    before = output.position()
    started = record.record(recipe.model_dump(mode="json"), data.described(recipe, sets))
    saver = Saver(output.checkpoints, recipe.model_dump(mode="json"), started, recipe.checkpoint)
    if before and is_first_rank():
        saver.publish(Position(**before))
    _announce(task, sets, plan.steps, output)
    if before and _finished(recipe, plan, before):
        console.print(f"{output.folder}: this run is finished; train.fresh=true starts another")
        return Outcome(output.folder, best_metrics(output.folder))

    _write_start(output, started, sets)
    task.look_ahead([example for one in sets.values() if one for example in one.examples], output.folder)
    train_set = _given(sets)
    if isinstance(train_set, Streamed):
        train_set.forget()
    batches = PlannedData(task.processing, train_set.examples, recipe.train.seed)
    start = before["batches"] if before else 0
    if is_first_rank():
        glance(task.processing, batches[next(plan.batches(start))])
    validation = sets["validation"]
    evaluation = _evaluation(recipe, validation, sets["regression"]) if validation else None
    with ProgressLine(task.processing.unit) as line:
        step = before["step"] if before else 0
        wrong = WrongSteps(output.folder, plan, batches.names, step)
        pace = speed.Speed(recipe.track.estimate, output.folder, plan.steps)
        after = AfterStep(recipe, plan, saver, evaluation, output.folder, wrong, pace, line)
        watching = Inside.of(recipe, after.position, output.folder, step)
        trainer = _trainer(recipe, output, plan, step, [*watching, after, *callbacks])
        sampler = PlanSampler(plan, trainer.global_rank // (recipe.train.tensor_parallel or 1))
        sampler.start = start
        checkpoint = output.checkpoint / "state" / FILE if output.checkpoint else None
        task.train_mode()
        trainer.fit(task, loader(batches, sampler, data.workers(recipe)), ckpt_path=checkpoint)
    if after.stopped_by and is_first_rank():
        if recipe.train.requeue:
            requeue(after.stopped_by)
        console.print(f"stopped and saved at step {after.position.step}; the same command goes on from there")
    elif is_first_rank():
        record.write_json(output.folder / "run.json", {**started, "position": after.position.as_dict()})
        _finish(after, output)
    return Outcome(output.folder, best_metrics(output.folder), after.stopped_by)


def _finished(recipe: Recipe, plan: Schedule, before: dict[str, Any]) -> bool:
    """Whether a run has nothing left to do: all steps are done, or it stopped for want of progress."""
    patience = recipe.evaluate.patience
    return bool(before["step"] >= plan.steps or (patience is not None and before["stale"] >= patience))


def _shareable(per_step: int, ranks: int, asked: int) -> int:
    """Batches of an optimizer step as the run had them, if these devices can share them equally."""
    if per_step % ranks:
        raise CheckpointError(
            "the batches of an optimizer step can't be shared equally by these devices",
            where="train.devices",
            given=f"{ranks} devices",
            expected=f"a divisor of {per_step}, as the run had",
        )
    if per_step != asked:
        log.warning("train.accumulate is now %d, so that the batches stay as they were", per_step // ranks)
    return per_step


def _machine(recipe: Recipe) -> dict[str, Any]:
    section = recipe.train
    return {
        "accelerator": section.accelerator,
        "devices": strategies.devices(section),
        "num_nodes": section.nodes,
        "strategy": strategies.strategy(recipe),
        "precision": {"32": "32-true"}.get(section.precision, section.precision),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def _trainer(recipe: Recipe, output: Output, plan: Schedule, step: int, callbacks: list[Callback]) -> Trainer:
    return Trainer(
        **_machine(recipe),
        max_epochs=1,  # the plan holds all epochs
        accumulate_grad_batches=plan.per_step // plan.ranks,
        logger=choose.loggers(recipe, output.folder, step),
        callbacks=callbacks,
        plugins=[TensorIO()],
        default_root_dir=output.folder,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )


def _evaluation(recipe: Recipe, validation: Collected, regression: Collected | None) -> Callable[[Task], Evaluation]:
    def one(task: Task, collected: Collected, benchmarks: bool = True) -> Evaluation:
        with progress("evaluating", "batches") as show:

            def moved(done: int, total: int) -> None:
                beat()
                show(done, total)

            limit, workers = recipe.evaluate.limit, data.workers(recipe)
            return evaluate(
                task, collected, recipe, limit=limit, workers=workers, benchmarks=benchmarks, progress=moved
            )

    def run(task: Task) -> Evaluation:
        mark("evaluating")
        found = one(task, validation)
        return found if regression is None else beside(found, "regression", one(task, regression, benchmarks=False))

    return run


def _announce(task: Task, sets: dict[str, Collected | None], steps: int, output: Output) -> None:
    if not is_first_rank():
        return
    for name, collected in sets.items():
        if collected is not None:
            console.print(f"{name}: {collected.part}{collected.report.summary()}", highlight=False)
    trained = sum(parameter.numel() for parameter in task.parameters() if parameter.requires_grad)
    whole = sum(parameter.numel() for parameter in task.parameters())
    console.print(
        f"model: {trained / 1e6:.2f} of {whole / 1e6:.2f} million parameters are trained; {steps} steps",
        highlight=False,
    )
    if strategies.emulates_bf16(task.recipe.train):
        console.print(
            f"train.precision={task.recipe.train.precision}: this processor has no units for bf16 and computes it many "
            "times slower than 32",
            highlight=False,
        )
    if output.checkpoint:
        console.print(f"resuming from {output.checkpoint}", highlight=False)


def _write_start(output: Output, started: dict[str, Any], sets: dict[str, Collected | None]) -> None:
    if not is_first_rank():
        return
    record.write_json(output.folder / "run.json", started)
    record.write_json(
        output.folder / "data.json", {name: collected.report.as_dict() for name, collected in sets.items() if collected}
    )


def _finish(after: AfterStep, output: Output) -> None:
    position = after.position
    console.print(
        f"finished {position.step} steps in {duration(position.seconds)} of training; skipped {position.skipped} steps",
        highlight=False,
    )
    if isinstance(after.plan, StreamPlan):
        console.print(f"train: {after.plan.report(position.batches).summary()}", highlight=False)
    if position.bad:
        log.warning("%d examples could not be read during training and were left out", position.bad)
    console.print(f"best model: {output.checkpoints / 'best' / 'model'}", highlight=False)


def best_metrics(folder: Path) -> dict[str, Any]:
    """The metrics of the best checkpoint of a run, or nothing before its first evaluation."""
    file = folder / "metrics.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found
