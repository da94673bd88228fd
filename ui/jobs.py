"""Commands that run as processes of their own, and go on when the page is closed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ..common.errors import LuthierError
from ..common.kinds import PACKAGE
from ..common.record import write_json
from .place import Place

TOKEN = "LUTHIER_UI_TOKEN"
"""Environment variable with a token of one's own; else one is drawn at each start."""
DRIFT = 5.0
"""Seconds by which the time at which a process began may seem to move, as the machine's clock is set."""


class Jobs:
    """The commands that were started from the page, by name: one of a name at a time.

    Which process runs which command stands in a file, so that a page that is opened anew finds them.
    """

    def __init__(self, place: Place):
        self._place, self._file = place, place.own / "jobs.json"
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()  # handlers of the page run in threads

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `luthier ARGUMENTS`. Raises LuthierError if a command of this name still runs."""
        with self._starting:
            if self.is_running(name):
                raise LuthierError("it runs already", where=name, do="stop it first")
            with self.log(name).open("wb") as log:
                log.write(f"$ luthier {' '.join(arguments)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    command(arguments),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self._place.folder,
                    start_new_session=True, env=_environment(),
                )  # fmt: skip
            self._started[name] = process
            known = self._known()
            known.pop(name, None)  # the newest last
            known[name] = {"pid": process.pid, "begun": _begun(process.pid)}
            write_json(self._file, known)

    def names(self) -> list[str]:
        """Names of the commands that this folder has seen, the newest last; those of runs begin with no slash."""
        return list(self._known())

    def is_running(self, name: str) -> bool:
        """Whether a command of this name runs, whichever page has started it."""
        return self._pid(name) is not None

    def _pid(self, name: str) -> int | None:
        own = self._started.get(name)
        if own is not None and own.poll() is None:
            return own.pid
        known = self._known().get(name) or {"pid": 0, "begun": None}  # of another page, or this one before
        begun = None if known["begun"] is None else _begun(known["pid"])
        return known["pid"] if begun is not None and abs(begun - known["begun"]) < DRIFT else None

    def state(self, name: str) -> str:
        """For people: `running`, `stopped, resumable`, `done`, or that it failed."""
        if self.is_running(name):
            return "running"
        code = self._started[name].returncode if name in self._started else None
        told = {None: "not running", 0: "done", 143: "stopped, resumable", 130: "stopped, resumable"}
        return told.get(code, f"ended with exit code {code}")

    def stop(self, name: str) -> None:
        """Ask it to save and stop (SIGTERM), as a cluster does."""
        pid = self._pid(name)
        if pid is None:
            raise LuthierError("it does not run", where=name)
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGTERM)

    def log(self, name: str) -> Path:
        return self._place.own / f"{slug(name)}.log"

    def tail(self, name: str, characters: int = 6000) -> str:
        """The end of what it has printed."""
        try:
            with self.log(name).open("rb") as file:
                file.seek(max(0, self.log(name).stat().st_size - characters))
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def _known(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found


def command(arguments: Sequence[str]) -> list[str]:
    """`luthier ARGUMENTS` as a process; -P: no file of the folder takes the place of a library, as with the script."""
    return [sys.executable, "-P", "-m", PACKAGE, *arguments]


def _environment() -> dict[str, str]:
    """This one, but for the page's token, which is no business of a training."""
    kept = {name: value for name, value in os.environ.items() if name != TOKEN}
    return {**kept, "PYTHONUNBUFFERED": "1", "COLUMNS": "110"}


def slug(name: str) -> str:
    """A name as a file may have it; two names never give the same one."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".lstrip("-")


def _begun(pid: int) -> float | None:
    """When a process began, by which another one with its number is told from it."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
