"""What a rank knows of the others: the file that each writes, and whether its process lives."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

GRACE = 3.0
"""Seconds that a process must have been gone before it counts as dead."""
SILENT = 120.0
"""Seconds after which a rank on another machine counts as dead if its file is not written any more."""


class Peer:
    """What is known of a rank, from its file and its process."""

    def __init__(self, rank: int, folder: Path, sitting: str):
        self.rank, self.sitting = rank, sitting
        self.file = folder / f"{rank}.json"
        self.record: dict[str, Any] = {}
        self.over = False
        self.written = self.moved = self.failed = time.monotonic()

    def read(self) -> None:
        """Look at its file."""
        try:
            record = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.over = bool(self.record) and self.file.parent.is_dir() and not self.file.exists()
            return
        if record["sitting"] == self.sitting:
            self.note(record)

    def note(self, record: dict[str, Any]) -> None:
        """Take what it has written; when, is by the clock of this process, as clocks differ."""
        now, before, self.record = time.monotonic(), self.record, record
        if record["written"] != before.get("written"):
            self.written = now
        if record["moves"] != before.get("moves"):
            self.moved = now
        if record["error"] != before.get("error"):
            self.failed = now

    def forgive(self) -> None:
        """Its silence so far may have been ours."""
        self.written = self.moved = time.monotonic()

    @property
    def here(self) -> bool:
        """Whether it runs on this machine, seeing the same processes."""
        return bool(self.record) and self.record["machine"] == machine()

    def gone(self) -> bool:
        """Whether its process has ended."""
        if not self.here:
            return bool(self.record) and time.monotonic() - self.written > SILENT
        try:
            process = psutil.Process(self.record["pid"])
            return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.record["began"]) > 1
        except psutil.NoSuchProcess:
            return True

    def dead(self) -> bool:
        """Whether its process has ended without a word, some time ago."""
        return not self.over and self.gone() and time.monotonic() - self.written > GRACE

    def order(self) -> tuple[int, bool, float]:
        """Of ranks that stand still, the smallest holds up the others."""
        return self.record.get("passed", -1), self.record.get("waits", False), self.moved

    def told(self) -> str:
        """What it is doing, and where."""
        if not self.record:
            return "it has not started"
        at = f", at {self.record['at']}" if self.record["at"] else ""
        return f"{self.record['doing']}{at} (process {self.record['pid']} on {self.record['host']})"


def machine() -> str:
    """What is equal for processes that see each other's process numbers, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
