"""Commands that run as processes of their own, and go on when the page is closed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ..common.errors import LuthierError
from ..common.record import write_json
from .place import Place


class Jobs:
    """The commands that were started from the page, by name: one of a name at a time.

    Which process runs which command stands in a file, so that a page that is opened anew finds them.
    """

    def __init__(self, place: Place):
        self._place, self._file = place, place.own / "jobs.json"
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `luthier ARGUMENTS`. Raises LuthierError if a command of this name still runs."""
        if self.is_running(name):
            raise LuthierError("it runs already", where=name, do="stop it first")
        with self.log(name).open("wb") as log:
            log.write(f"$ luthier {' '.join(arguments)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", __package__.split(".")[0], *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self._place.folder,
                start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "110"},
            )  # fmt: skip
        self._started[name] = process
        known = self._known()
        known[name] = {"pid": process.pid, "begun": _begun(process.pid)}
        write_json(self._file, known)

    def is_running(self, name: str) -> bool:
        if name in self._started:
            return self._started[name].poll() is None
        known = self._known().get(name)
        return known is not None and known["begun"] is not None and _begun(known["pid"]) == known["begun"]

    def state(self, name: str) -> str:
        """For people: `running`, `stopped, resumable`, `done`, or that it failed."""
        if self.is_running(name):
            return "running"
        code = self._started[name].returncode if name in self._started else None
        told = {None: "not running", 0: "done", 143: "stopped, resumable", 130: "stopped, resumable"}
        return told.get(code, f"ended with exit code {code}")

    def stop(self, name: str) -> None:
        """Ask it to save and stop (SIGTERM), as a cluster does."""
        if not self.is_running(name):
            raise LuthierError("it does not run", where=name)
        os.kill(self._known()[name]["pid"], signal.SIGTERM)

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


def slug(name: str) -> str:
    """A name as a file may have it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "job"


def _begun(pid: int) -> float | None:
    """When a process began, by which another one with its number is told from it."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
