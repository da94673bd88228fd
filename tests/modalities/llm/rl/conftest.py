"""Servers of completions in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Process:
    """A server in a process of its own, on a port that it keeps."""

    def __init__(self, parent: subprocess.Popen[str], *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.parent, self.url, self.arguments = parent, f"http://127.0.0.1:{self.port}", arguments
        self.number: int | None = None

    def start(self, wait: bool = True) -> Process:
        protocol, model, *options = self.arguments
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(json.dumps([protocol, model, str(self.port), *options]) + "\n")
        self.parent.stdin.flush()
        self.number = int(self.parent.stdout.readline())
        return self.ready() if wait else self

    def ready(self) -> Process:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server does not start")

    def kill(self) -> None:
        if self.number is not None:
            os.kill(self.number, signal.SIGKILL)
            self.number = None


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Process]]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    script = str(Path(__file__).with_name("serve.py"))
    parent = subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**kept, "OMP_NUM_THREADS": "1"},
    )
    made: list[Process] = []

    def start(*arguments: str, wait: bool = True) -> Process:
        made.append(Process(parent, *arguments))
        return made[-1].start(wait)

    yield start
    for one in made:
        one.kill()
    parent.kill()
    parent.wait()
