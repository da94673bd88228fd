"""Does a short training behave? The largest batch once, then one batch over and over."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import nn

from .. import optim
from ..data.processing import Batch
from ..errors import LuthierError, ModelError
from ..evaluation.run import autocast
from ..seeding import seed_batch
from ..task import Task
from . import memory
from .subject import Subject, largest

STEPS = 8
"""Optimizer steps on one batch."""
ROUNDING = {"32": 2.0**-20, "bf16-mixed": 2.0**-8, "bf16-true": 2.0**-8, "16-mixed": 2.0**-11}
"""By how much a loss may differ, relative to itself, though nothing but rounding has changed: 2 to the power of minus
the places that a number has (24, 8 and 11), and for the sums in 32 bits another 4."""


def one_step(subject: Subject) -> tuple[float, str]:
    """Forward and backward of the largest batch, twice (the first one pays for allocation); seconds of the second."""
    task, plan = subject.task, subject.plan
    assert task is not None
    assert plan is not None
    planned, seconds = largest(plan), 0.0
    task.train_mode()
    for _ in range(2):
        started = time.perf_counter()
        batch = subject.batch(planned)
        loss, count = _forward(task, batch)
        loss.backward()
        trained = _trained(task)
        gradients = [parameter.grad for _, parameter in trained if parameter.grad is not None]
        if not _finite(loss, gradients):
            raise LuthierError(
                "loss or gradient is not finite",
                where="data.train",
                given=f"loss {loss.item() / count:.4g}",
                do="look for broken examples with data.batch.examples=1, or use train.precision=32 or bf16-mixed",
            )
        reached = sum(bool(gradient.any()) for gradient in gradients)
        task.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
    if not reached:
        raise ModelError(
            "the loss reaches nothing that is trained: every gradient is zero",
            where="model",
            given=f"{len(trained)} tensors are trained, such as {trained[0][0]}",
            do="train a part that the loss depends on (model.lora.target_modules, or what is frozen)",
        )
    subject.seconds = seconds
    idle = len(trained) - len(gradients)
    unmoved = f"; {idle} of {len(trained)} trained tensors are not reached" if idle else ""
    return seconds, (
        f"{len(planned.indices)} examples, {batch.padded:.1f} {subject.processing.unit} padded; loss "
        f"{loss.item() / count:.4f} over {count:g}; {seconds:.2f} s{unmoved}"
    )


def repeated(subject: Subject) -> tuple[None, str]:
    """Train on one batch over and over, with the recipe's optimizer and the same draws: its loss has to fall. The
    trained parameters stay as they are then: what is saved and exported next differs from the start model."""
    task, plan, recipe = subject.task, subject.plan, subject.recipe
    assert task is not None
    assert plan is not None
    optimizer = optim.optimizer(task, recipe.optim, fused=False)
    rates = [group["lr"] for group in optimizer.param_groups]
    if not any(rates):
        raise LuthierError("every learning rate is zero", where="optim.learning_rate", do="raise it")
    batch, losses = subject.batch(next(plan.batches())), list[float]()
    task.train_mode()
    for step in range(STEPS + 1):
        seed_batch(recipe.train.seed, 0)
        loss, count = _forward(task, batch)
        losses.append(loss.item() / count)
        if step == STEPS:
            break
        loss.backward()
        parameters = [parameter for _, parameter in _trained(task) if parameter.grad is not None]
        if not _finite(loss, [parameter.grad for parameter in parameters if parameter.grad is not None]):
            losses.append(math.nan)
            break
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= count
        nn.utils.clip_grad_norm_(parameters, recipe.optim.clip_norm or math.inf)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (step + 1) / STEPS
        optimizer.step()
        task.zero_grad(set_to_none=True)
    subject.used = max(0, memory.peak(task.device) - subject.base)
    return None, _judged(task, losses, rates)


def _judged(task: Task, losses: Sequence[float], rates: Sequence[float]) -> str:
    course = " -> ".join(f"{losses[at]:.4g}" for at in (0, len(losses) // 2, -1))
    told = f"loss of one batch over {STEPS} steps: {course}"
    if not all(map(math.isfinite, losses)):
        raise LuthierError(
            "the loss of a repeated batch does not stay finite",
            where="optim.learning_rate",
            given=f"{course} at {max(rates):g}",
            do="lower the learning rate, or set optim.clip_norm",
        )
    if task.need_not_fall:
        return f"{told} (it need not fall: {task.need_not_fall})"
    if min(losses[1:]) >= losses[0]:
        rises = losses[-1] > losses[0]
        rounding = abs(losses[0]) * ROUNDING[task.recipe.train.precision]
        if rises and max(losses) - losses[0] < rounding:
            return f"{told} (less than {task.recipe.train.precision} can tell: the learning rate is {max(rates):g})"
        raise LuthierError(
            f"the loss of a repeated batch {'rises' if rises else 'does not move'}",
            where="optim.learning_rate",
            given=f"{course} at {max(rates):g}",
            do="lower the learning rate"
            if rises
            else "raise the learning rate; see which parts are trained, and with "
            "bf16-true that an update is not lost in rounding",
        )
    return told


def _forward(task: Task, batch: Batch) -> tuple[torch.Tensor, float]:
    """(summed loss, count) of a batch. Raises if nothing in it carries loss."""
    if batch.data is None:
        raise batch.bad[0] if batch.bad else LuthierError("the batch is empty", where="data.train")
    try:
        with autocast(task.recipe.train.precision, task.device):
            loss = task.loss(batch.data)
    except IndexError as error:
        raise ModelError(
            f"a number in the data has no row in the model's tables: {error}",
            where="model.path",
            given=_tables(task),
            do="use the tokenizer that belongs to the model, and labels within its classes",
        ) from error
    except torch.OutOfMemoryError as error:
        raise LuthierError(
            "the device is out of memory at the largest batch",
            where="data.batch",
            given=f"{batch.padded:g} padded over {len(batch.indices)} examples",
            do="lower data.batch, set train.gradient_checkpointing, or see `luthier estimate`",
        ) from error
    if not loss.count:
        raise LuthierError(
            "nothing in the batch carries loss",
            where="data.train",
            given=f"{len(batch.indices)} examples",
            do="look at `luthier inspect`: which tokens carry loss",
        )
    return loss.sum, loss.count


def _tables(task: Task) -> str:
    """The sizes of the model's tables of vectors."""
    found = [f"{name}: {len(one.weight)} rows" for name, one in task.named_modules() if isinstance(one, nn.Embedding)]
    return "; ".join(found[:3]) or "no table"


def _trained(task: Task) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in task.named_parameters() if parameter.requires_grad]


def _finite(loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> bool:
    """Whether loss and gradients are numbers."""
    return bool(torch.isfinite(loss)) and all(bool(gradient.isfinite().all()) for gradient in gradients)
