"""`luthier estimate`: parameters, operations, memory, checkpoints, time and money of a recipe."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import kinds, record
from ..check import model, training
from ..check.subject import Subject
from ..checkpoint.save import STATE_COPIES
from ..console import console, duration, progress
from ..errors import LuthierError
from ..recipe import Recipe
from ..training import data
from ..training.run import set_threads
from . import memory
from .devices import UTILISATION, Device, find
from .step import Step, dry_step

TRIES = 3.0
"""Runs that are paid for until one is kept: settings are tried, and something goes wrong."""


def estimate(
    recipe: Recipe,
    devices: int = 1,
    device: str | None = None,
    room: float | None = None,
    price: float | None = None,
    tries: float = TRIES,
    measure: bool = False,
    file: Path | None = None,
) -> dict[str, Any]:
    """Print what a run will need, and give it as plain values.

    Args:
        recipe: the resolved recipe.
        devices: number of devices.
        device: name in the table; None: that of this machine.
        room: memory of one, in GB; None: as the table has it.
        price: of one device for an hour.
        tries: runs that are paid for until one is kept.
        measure: run a step here instead of assuming a speed; it loads the model.
        file: where it goes as JSON.
    """
    set_threads(recipe)
    subject = Subject(recipe, kinds.task(recipe.task.kind))
    subject.processing = subject.kind.make_processing(recipe)
    train = data.gather(recipe, subject.processing, "train")
    assert train is not None
    subject.sets["train"] = train
    subject.plan = data.plan(recipe, train, subject.processing, 1, recipe.train.accumulate)
    unit = find(device)
    size = room * 1e9 if room is not None else unit.memory
    with progress("running a step dry", "steps") as show:
        plain = checkpointed = _dry(subject, False)
        show(1, 2)
        with suppress(LuthierError):  # a model that can't: the plain one counts for both
            checkpointed = _dry(subject, True)
    own = checkpointed if recipe.train.gradient_checkpointing else plain
    found = {
        "model": _model(own, recipe, subject.processing.unit),
        "memory": _memory(plain, checkpointed, recipe, devices, size),
        "checkpoints": _checkpoints(own, recipe),
        "time": _time(subject, own, unit, devices, price, tries, measure),
    }
    if file is not None:
        record.write_json(file, {"kind": recipe.task.kind, "devices": devices, "device": asdict(unit), **found})
    return found


def _dry(subject: Subject, checkpointing: bool) -> Step:
    try:
        return dry_step(subject, checkpointing)
    except LuthierError:
        raise
    except Exception as error:  # an operation that torch can't run without contents
        raise LuthierError(
            "this model can't be looked at without its weights",
            where="model.path",
            given=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            do="run `luthier check`, which measures a step",
        ) from error


def _model(step: Step, recipe: Recipe, unit: str) -> dict[str, Any]:
    """Parameters, and operations beside the rule of thumb: 2 for each parameter forward, 2 backward, 2 for each that
    is trained: 6 N D, or 4 N D with a frozen base."""
    rule = 2 * step.parameters + 2 * step.parameters + 2 * step.trained
    console.print(
        f"model: {step.trained / 1e6:,.1f} of {step.parameters / 1e6:,.1f} million parameters are trained\n"
        f"operations for each of the {unit}: {step.forward / step.cost:.3g} forward, {step.backward / step.cost:.3g} "
        f"backward, attention and output layer included; by the rule of thumb {rule:.3g}",
        highlight=False,
    )
    return {
        "parameters": step.parameters, "trained": step.trained, "unit": unit, "rule": rule,
        "forward": step.forward / step.cost, "backward": step.backward / step.cost,
    }  # fmt: skip


def _memory(plain: Step, checkpointed: Step, recipe: Recipe, devices: int, room: float) -> dict[str, Any]:
    """A row for each strategy: parts in GB, and what fits."""
    has, own = recipe.train.gradient_checkpointing, recipe.train.strategy
    names = [own] if devices == 1 else list(dict.fromkeys([own, "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"]))
    columns = ("weights", "gradients", "optimizer", "activations", "checkpointed", "at most", f"in {room / 1e9:.0f} GB")
    table = Table("GB on a device", *columns)
    found: dict[str, Any] = {}
    for name in names:
        parts = [memory.of(step, recipe.optim, name, devices) for step in (plain, checkpointed)]
        chosen = parts[has]
        fits = memory.fitting(parts[0], parts[1], room, has)
        numbers = (
            chosen.weights, chosen.gradients, chosen.optimizer, *(part.activations for part in parts), chosen.total,
        )  # fmt: skip
        table.add_row(name, *(f"{number / 1e9:.2f}" for number in numbers), fits or "does not fit")
        found[name] = {**asdict(chosen), "total": chosen.total, "without_checkpointing": parts[0].total,
                       "with_checkpointing": parts[1].total, "fits": fits}  # fmt: skip
    console.print(table)
    if plain.cache:
        console.print(f"keys and values while it writes: {plain.cache / 1e9:.2f} GB", highlight=False)
    if not any(each["fits"] for each in found.values()):
        console.print("nothing fits: train an adapter (model.lora), in 4 bits, or cut it over devices", highlight=False)
    return found


def _checkpoints(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Sizes on disk, as the run keeps them."""
    model = step.gradients
    whole, kept = model * (1 + STATE_COPIES[recipe.optim.name]), recipe.checkpoint.keep_last + 1
    console.print(
        f"a checkpoint: {whole / 1e9:.2f} GB, {model / 1e9:.2f} GB of it the model; {kept} are kept and one is being "
        f"written: {(kept + 1) * whole / 1e9:.2f} GB",
        highlight=False,
    )
    return {"bytes": whole, "model": model, "kept": kept, "disk": (kept + 1) * whole}


def _time(
    subject: Subject, step: Step, unit: Device, devices: int, price: float | None, tries: float, measure: bool
) -> dict[str, Any]:
    """Time and money of the whole training, from the table or from a step that is run here."""
    plan, precision = subject.plan, subject.recipe.train.precision
    assert plan is not None
    cost = sum(plan.cost(batch) for batch in plan.batches())
    each = (step.forward + step.backward) / step.cost
    if measure:
        model.load(subject)
        seconds = training.one_step(subject)[0] / step.cost * cost / devices
        basis = "a step that was run here"
    else:
        seconds = each * cost / (devices * unit.peak(precision) * UTILISATION)
        basis = f"{unit.name}: {unit.peak(precision) / 1e12:.3g} TFLOP/s at most, {UTILISATION:.0%} of it assumed"
    paid = None if price is None else price * devices * seconds / 3600
    told = "" if paid is None else f"; {paid:,.2f} for it, {paid * tries:,.2f} with {tries:g} tries"
    console.print(
        f"time: {duration(seconds)} for {plan.steps} steps, {each * cost:.3g} operations, on {devices} "
        f"device{'s' if devices > 1 else ''}, without evaluation ({basis}){told}",
        highlight=False,
    )
    return {
        "seconds": seconds, "steps": plan.steps, "cost": cost, "operations": each * cost, "measured": measure,
        "basis": basis, "price": paid, "price_with_tries": None if paid is None else paid * tries,
    }  # fmt: skip
