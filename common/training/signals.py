"""SIGTERM, SIGUSR1 and Ctrl-C ask the run to save and stop; the run looks after each optimizer step, on all ranks."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

import torch

log = logging.getLogger(__name__)

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}
"""Exit code of a run that saved and stopped on a signal; 143 makes schedulers requeue."""


def exit_code(number: int) -> int:
    """Exit code of a run that a signal stopped."""
    return EXIT_CODES[signal.Signals(number)]


class StopSignals:
    """Handlers that only set a flag. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received:
            raise KeyboardInterrupt
        self.received = number
        log.warning("%s: saving after this step, then stopping", signal.Signals(number).name)

    def agreed(self) -> int:
        """The signal that any rank has received, or 0; the same answer on every rank."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self.received
        flag = torch.tensor([self.received])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=_cpu_group())
        return int(flag.item())


_group: Any = None


def _cpu_group() -> Any:
    """A gloo group, so that looking at a flag never waits for a device."""
    global _group
    if _group is None and torch.distributed.get_backend() != "gloo":
        _group = torch.distributed.new_group(backend="gloo")
    return _group
