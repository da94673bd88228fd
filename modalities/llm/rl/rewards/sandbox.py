"""Runs programs that nobody has read, such as those that a policy writes.

| limit | how |
| --- | --- |
| time | wall clock; then the process, its session and its namespace are killed as a whole; `RLIMIT_CPU` besides |
| memory | `RLIMIT_AS` of each process |
| files | a file system of its own in memory with a size; `RLIMIT_FSIZE`; all else is read-only, homes are hidden |
| processes | `RLIMIT_NPROC` of a user of its own, or in a user namespace; none outlives the program |
| network | a network namespace without devices |
| output | read up to a size; then the program is killed |
| environment | empty but for the thread counts of numerical libraries; Python's isolated mode; no descriptors of ours |

Namespaces need Linux, and root or user namespaces. Elsewhere `missing()` says what is not enforced.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START = 10.0
"""Seconds that the launcher may take, beside those of the program."""
_numbers = count()


class SandboxError(Exception):
    """The sandbox could not run a program; the program is not at fault."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Args:
        timeout: seconds.
        memory: MiB of each process.
        disk: MiB of all files.
        processes: processes and threads at a time.
        output: KiB written to its output.
    """

    timeout: float = 10.0
    memory: int = 512
    disk: int = 16
    processes: int = 1
    output: int = 1024


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    Args:
        how: `exited`, or killed since it took too long (`timeout`) or wrote too much (`output`).
        code: exit code, minus the signal that ended it; None: it was killed here.
        output: what it wrote, decoded; never to be trusted.
        missing: what was not enforced.
    """

    how: Literal["exited", "timeout", "output"]
    code: int | None
    output: str
    missing: tuple[str, ...] = ()


def run(source: str, stdin: str = "", limits: Limits = Limits()) -> Ended:  # it is frozen
    """Run a Python program.

    Args:
        source: its text.
        stdin: its standard input.
        limits: what it may use.

    Raises:
        SandboxError: it could not be run.
    """
    job = {
        "source": source,
        "python": sys.executable,
        "environment": _ENVIRONMENT,
        "needed": sorted({os.path.realpath(sys.base_prefix), sys.base_prefix, os.path.abspath(sys.prefix)}),
        "number": os.getpid() * 1000 + next(_numbers) % 1000,
        "timeout": limits.timeout,
        "memory": limits.memory,
        "disk": limits.disk,
        "processes": limits.processes,
    }
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        folder = os.path.realpath(folder)
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        with tempfile.TemporaryFile() as given:
            given.write(stdin.encode("utf-8", "surrogatepass"))
            given.seek(0)
            return _run(folder, given, limits)


def _run(folder: str, given: Any, limits: Limits) -> Ended:
    here, there = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, here)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), folder, str(there)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(there,),
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(there)
        stack.callback(_kill, process)
        how, output, told = _follow(process, here, limits)
        code = None
        missing: tuple[str, ...] = ()
        started = False
        for line in told.splitlines():
            said = json.loads(line)
            if "failed" in said:
                raise SandboxError(f"the program can't be started: {said['failed']}")
            if "missing" in said:
                missing, started = tuple(said["missing"]), True
            code = said.get("code", code)
    if not started or (how == "exited" and code is None):
        raise SandboxError(f"the launcher ended without a word (exit code {process.returncode})")
    return Ended(how, code if how == "exited" else None, output.decode("utf-8", "replace"), missing)


def _follow(
    process: subprocess.Popen[bytes], status: int, limits: Limits
) -> tuple[Literal["exited", "timeout", "output"], bytes, bytes]:
    """(how it ended, what it wrote, what the launcher told), read until the program has ended or must end."""
    assert process.stdout is not None
    output, told = bytearray(), bytearray()
    deadline = time.monotonic() + limits.timeout + _START
    is_over = False
    with selectors.DefaultSelector() as selector:
        for descriptor in (process.stdout.fileno(), status):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return "exited" if is_over else "timeout", bytes(output), bytes(told)
            for key, _ in ready:
                part = os.read(key.fd, 65536)
                if not part:
                    selector.unregister(key.fd)
                if key.fd != status:
                    output += part
                elif part:
                    deadline = deadline if told else time.monotonic() + limits.timeout  # it begins now
                    told += part
                else:  # where processes can leave their session, one may hold the output open
                    is_over, deadline = True, time.monotonic() + 0.2
            if len(output) > limits.output * 1024:
                return "output", bytes(output[: limits.output * 1024]), bytes(told)
    return "exited", bytes(output), bytes(told)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, and with it all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@cache
def missing() -> tuple[str, ...]:
    """What this machine does not enforce.

    Raises:
        SandboxError: it runs no program at all.
    """
    ended = run("print(6 * 7)", limits=Limits(timeout=30))
    if ended.code != 0 or ended.output != "42\n":
        raise SandboxError(f"a program that works ended with exit code {ended.code}: {ended.output[:200]}")
    return ended.missing
