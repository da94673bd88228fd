"""What a run is doing, seen from outside by the files that it writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import directory
from ..training.output import CHECKPOINTS
from .processes import Sitting

PAUSE = 0.0005
"""Seconds between two looks; a save of a small model takes some hundredths."""


class Watch:
    """Looks at the output of one sitting; made before the sitting starts.

    Args:
        output: folder of the run.

    `saves` holds the names of all saves that have been seen.
    """

    def __init__(self, output: Path):
        self.root, self._curves = output / CHECKPOINTS, output / "curves.csv"
        self._before = self._changed()
        self.saves: set[str] = set()

    def _changed(self) -> int:
        """Time of the last change of the curves, in ns; 0 if there are none."""
        try:
            return self._curves.stat().st_mtime_ns
        except OSError:
            return 0

    def begun(self) -> bool:
        """Whether this sitting has come to its training: it has opened the curves and cleared what a kill had left."""
        return self._changed() != self._before

    def step(self) -> int:
        """The last optimizer step that this sitting has logged, or the one it goes on from; 0 before."""
        if not self.begun():
            return 0
        lines = self._curves.read_bytes().split(b"\n")[1:-1]  # without the header and what is being written
        return int(lines[-1].split(b",")[0]) if lines else 0

    def saving(self) -> str | None:
        """Name of the folder of the save that is under way in this sitting."""
        now = unfinished(self.root) if self.begun() else []
        self.saves.update(now)
        return now[-1] if now else None

    def until(self, condition: Callable[[], bool], sitting: Sitting, timeout: float) -> bool:
        """Wait for something to be seen; False if the sitting ends, or `timeout` s pass, before."""
        ends = time.monotonic() + timeout
        while not condition():
            if sitting.exit_code() is not None or time.monotonic() > ends:
                return condition()
            self.pause()
        return True

    def pause(self) -> None:
        """Wait until the next look is due: seldom while a sitting starts, often when it trains."""
        time.sleep(PAUSE if self.begun() else 20 * PAUSE)


def unfinished(root: Path) -> list[str]:
    """Names of the folders under `checkpoints/` that are being written, or whose writing was cut short."""
    try:
        return [name for name in os.listdir(root) if name.startswith("step-") and name.endswith(directory.PARTIAL)]
    except OSError:
        return []
