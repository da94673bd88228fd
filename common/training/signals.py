"""SIGTERM, SIGUSR1 and Ctrl-C ask the run to save and stop; the run looks after each optimizer step, on all ranks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch

from ..console import console
from . import ranks

log = logging.getLogger(__name__)

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}
"""Exit code of a run that saved and stopped on a signal; 143 makes schedulers requeue."""
TWICE = 1.0
"""Seconds after a Ctrl-C from which another one counts as the second: torchrun passes on the one that all have got."""


def exit_code(number: int) -> int:
    """Exit code of a run that a signal stopped."""
    return EXIT_CODES[signal.Signals(number)]


def leave(code: int, say: str = "") -> NoReturn:
    """End this process and all that it has started at once, wherever its main thread hangs.

    Args:
        code: exit code.
        say: last words, for stderr.
    """
    last = threading.Thread(target=_last_words, args=(say,), daemon=True)
    last.start()
    last.join(2)  # what stdout leads to may be what hangs
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(code)


def _last_words(say: str) -> None:
    if say:
        print(say, file=sys.stderr)
    sys.stderr.flush()
    console.show_cursor()
    sys.stdout.flush()


class StopSignals:
    """Handlers that only set a flag. A second Ctrl-C ends the process at once; earlier checkpoints are untouched."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._other_pipe = -1

    def install(self) -> None:
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, self._handle)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._other_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=_second_interrupt, args=(self._pipe[0],), daemon=True, name="signals").start()

    def remove(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._pipe is not None:
            signal.set_wakeup_fd(self._other_pipe)
            os.close(self._pipe[1])  # the thread reads the end of it, and ends
            self._pipe = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.received:
            log.warning("%s: saving after this step, then stopping", signal.Signals(number).name)
        self.received = self.received or number

    def agreed(self) -> int:
        """The signal that any rank has received, or 0; the same answer on every rank."""
        if not ranks.connected():
            return self.received
        flag = torch.tensor([self.received])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=ranks.cpu_group())
        return int(flag.item())


def _second_interrupt(pipe: int) -> None:
    """Reads which signals arrive, also while the main thread hangs in a call that runs no handler."""
    first: float | None = None
    while received := os.read(pipe, 1):
        if received[0] != signal.SIGINT:
            continue
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > TWICE:
            leave(EXIT_CODES[signal.SIGINT])
    os.close(pipe)


# ---------------------------------------------------------------------------------------------- data workers

_running = 0


@contextmanager
def workers_shielded() -> Iterator[None]:
    """Signals do nothing to processes that are forked in here, such as data workers: they are the run's to answer.

    A scheduler sends them to every process of a job, and the step that is to be saved still needs its data.
    """
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1


_parent = 0


def _forks() -> None:
    global _parent
    _parent = os.getpid()


def _forked() -> None:
    if not _running:
        return
    if (pipe := signal.set_wakeup_fd(-1)) >= 0:
        os.close(pipe)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(_parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End with the process that has started this one, or at its SIGTERM, and at no other."""
    while True:
        found = signal.sigtimedwait({signal.SIGTERM}, 1)
        if os.getppid() != parent or (found is not None and found.si_pid == parent):
            os._exit(0)


if hasattr(signal, "sigtimedwait"):
    os.register_at_fork(before=_forks, after_in_child=_forked)


# ---------------------------------------------------------------------------------------------- SLURM


def requeue(number: int) -> None:
    """Put this SLURM job back into its queue, after SIGTERM or SIGUSR1; elsewhere nothing happens."""
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # the plain id of one task of an array can mean the whole array
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if job is None or number not in (signal.SIGTERM, signal.SIGUSR1):
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("the job %s could not be put back into the queue: %s", job, error)
        return
    if done.returncode:
        log.error("the job %s could not be put back into the queue: %s", job, done.stderr.strip())
    else:
        log.warning("the job %s is back in the queue", job)
