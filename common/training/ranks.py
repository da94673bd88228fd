"""Several processes that act as one: what the first decides about the output, all of them learn."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from torch import distributed

from ..console import is_first_rank
from ..errors import LuthierError, RecipeError

Decided = TypeVar("Decided")
CHOSEN = "LUTHIER_OUTPUT"
"""Holds the first rank's decision, for the processes that Lightning starts from it."""
REFUSED = 2
"""Exit code of a rank where the first one has refused the run; it says nothing, as the first has told the reason."""


def connected() -> bool:
    """Whether this process can talk to the other ranks."""
    return distributed.is_available() and distributed.is_initialized()


def join(trainer: Trainer, timeout: float) -> None:
    """Connect the processes that torchrun or SLURM have started, before anything is written.

    Those that Lightning starts connect later, in `fit`; they get the first one's decision through the environment.

    Args:
        trainer: any trainer with the recipe's strategy and devices.
        timeout: seconds that ranks wait for each other.

    Raises:
        RecipeError: the processes are not those that the recipe asks for.
        LuthierError: some of them did not come within `train.timeout`.
    """
    global _patience
    _patience = timedelta(seconds=timeout)
    outside, asked = _started_outside(), trainer.num_devices * trainer.num_nodes
    if outside is None and trainer.num_nodes > 1:
        raise RecipeError(
            "several machines need a launcher that starts the processes",
            where="train.nodes",
            given=trainer.num_nodes,
            do="start it on each machine with `torchrun --nnodes ... -m luthier train ...`, or with `srun`",
        )
    if outside is not None and outside != asked:
        problem = RecipeError(
            "the launcher has started another number of processes",
            where="train.devices x train.nodes",
            given=f"{outside} processes",
            expected=asked,
            do="set train.devices to the processes on each machine, and train.nodes to the number of machines",
        )
        raise problem if is_first_rank() else SystemExit(REFUSED)
    if outside is not None and outside > 1 and not connected():
        _connect(trainer)


def _connect(trainer: Trainer) -> None:
    strategy: Any = trainer.strategy
    strategy.accelerator.setup_device(strategy.root_device)
    connect = getattr(strategy, "setup_distributed", None) or strategy._setup_distributed
    try:
        connect()
    except distributed.DistError as error:
        raise LuthierError(
            f"the {trainer.world_size} processes of the run did not all come together",
            where=f"rank {trainer.global_rank}",
            given=str(error).splitlines()[0],
            do="look at the messages of the others; raise train.timeout if they need longer to load",
        ) from error


def _started_outside() -> int | None:
    """The number of processes that torchrun, SLURM or a script has started; None without such a launcher."""
    if distributed.is_available() and distributed.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"])
    if SLURMEnvironment.detect():
        return int(os.environ["SLURM_NTASKS"])
    if {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys() and CHOSEN not in os.environ and not connected():
        return int(os.environ["WORLD_SIZE"])
    return None


def agree(decide: Callable[[], Decided]) -> Decided:
    """What `decide` gives on the first rank, on every rank. If it refuses there, the others end without a word."""
    if not connected():
        return decide()
    if distributed.get_rank() != 0:
        learned: Decided = _learn()
        return learned
    told: list[Any] = [LuthierError("rank 0 failed"), None]
    try:
        decided = decide()
        told = [None, decided]
        return decided
    except LuthierError as error:
        told = [error, None]
        raise
    finally:
        distributed.broadcast_object_list(told, 0, group=cpu_group())


def _learn() -> Any:
    told: list[Any] = [None, None]
    try:
        distributed.broadcast_object_list(told, 0, group=cpu_group())
    except RuntimeError as error:
        raise LuthierError(
            "rank 0 ended before it had said where the run writes", given=str(error).splitlines()[0]
        ) from error
    if told[0] is not None:
        raise SystemExit(REFUSED) from told[0]
    return told[1]


_group: Any = None
_patience = timedelta(minutes=30)


def cpu_group() -> Any:
    """A gloo group, so that looking at a flag never waits for a device."""
    global _group
    if _group is None and distributed.get_backend() != "gloo":
        _group = distributed.new_group(backend="gloo", timeout=_patience)
    return _group
