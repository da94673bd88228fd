"""Runs in processes of their own, started, signalled and killed from outside, with what they print in a file."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from .. import kinds
from ..recipe import Recipe
from ..training.output import CHOSEN

PACKAGE = kinds.PACKAGE
TAIL = 30
"""Lines of a log that are shown when a run failed."""


class Sitting:
    """One `luthier ...` in a process group of its own, which a signal reaches as a whole.

    Args:
        arguments: of the command line.
        log: what the processes print is appended to this file.
        forked: fork from a server that has the libraries imported, which saves seconds over a fresh Python. Only for
            runs of one process (for several, Lightning starts the others by the command line of the first) on CPU.
    """

    def __init__(self, arguments: Sequence[str], log: Path, forked: bool):
        self.log, self.started = log, time.monotonic()
        self._begins = log.stat().st_size if log.exists() else 0
        environment = {name: value for name, value in os.environ.items() if name != CHOSEN}
        self.pid, self._join = (_fork if forked else _launch)(list(arguments), log, environment)

    def exit_code(self, timeout: float = 0.0) -> int | None:
        """Its exit code, negative after a signal that it did not handle; None if it still runs after `timeout` s."""
        return self._join(timeout)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes, as schedulers and terminals do."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it has ended, or has no group of its own yet
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> int:
        """SIGKILL to all its processes; waits until they are gone."""
        self.signal(signal.SIGKILL)
        code = self._join(60.0)
        assert code is not None  # nothing survives SIGKILL
        return code

    def printed(self) -> str:
        """What this sitting has printed so far."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as stream:
            stream.seek(self._begins)
            return stream.read().decode("utf-8", "replace")

    def tail(self) -> str:
        """The last lines of what it has printed."""
        return "\n".join(self.printed().splitlines()[-TAIL:])


def warm_up(recipe: Recipe) -> None:
    """Have the fork server import what runs of this kind need, and wait for it; a server that runs already stays.

    All of it is single-threaded, and nothing of it may touch a device, as neither survives a fork.
    """
    modules = ["torch", "lightning.pytorch", f"{PACKAGE}.common.cli", f"{PACKAGE}.common.training.run"]
    if find_spec("transformers"):
        modules += ["transformers.modeling_utils", "accelerate"]  # which transformers otherwise imports when first used
    _context().set_forkserver_preload([*modules, f"{kinds.modules()[recipe.task.kind]}.task"])
    first = _context().Process(target=os.getpid)
    first.start()
    first.join()


def _context() -> multiprocessing.context.ForkServerContext:
    return multiprocessing.get_context("forkserver")


Joined = Callable[[float], int | None]


def _fork(arguments: list[str], log: Path, environment: dict[str, str]) -> tuple[int, Joined]:
    process = _context().Process(target=_run, args=(arguments, str(log), os.getcwd(), environment))
    process.start()
    assert process.pid is not None  # it has been started

    def join(timeout: float) -> int | None:
        process.join(timeout)
        return process.exitcode

    return process.pid, join


def _run(arguments: list[str], log: str, folder: str, environment: dict[str, str]) -> None:
    """The command line, in a forked process."""
    os.setsid()
    _print_to(log)
    default = multiprocessing.get_all_start_methods()[0]  # here it is the fork server; a run's data workers are forked
    multiprocessing.set_start_method(default, force=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [PACKAGE, *arguments]
    from ..cli import main

    main(arguments)


def _print_to(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)  # those of a new Python
        stream.reconfigure(line_buffering=True)  # what was printed before a SIGKILL is kept


def _launch(arguments: list[str], log: Path, environment: dict[str, str]) -> tuple[int, Joined]:
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", PACKAGE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment, "PYTHONUNBUFFERED": "1"},
        )

    def join(timeout: float) -> int | None:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    return process.pid, join
