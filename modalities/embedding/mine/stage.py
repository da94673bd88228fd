"""Work that is done once: arrays on disk, each there whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....common.record import write_json

_LOG = logging.getLogger(__name__)


class Stage:
    """A folder of arrays that were all made with the same settings.

    What an interrupted run has finished is used again. If the folder was filled with other settings, it is emptied, and
    the user is told which settings differ.

    Args:
        folder: made if absent.
        settings: all that the arrays depend on.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]):
        self.folder = folder
        wanted, found = json.loads(json.dumps(settings)), self._settings()
        self.mark = wanted
        """The settings as plain values, for the settings of a stage that builds on this one."""
        if found == wanted:
            return
        if found is not None:
            changed = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            _LOG.info("%s starts over, as other %s were used before", folder.name, ", ".join(changed))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / "settings.json", wanted)

    def _settings(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError):
            return None

    def array(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The array of that name, mapped from its file (not read into memory); made first if it isn't there.

        Args:
            name: file name without extension.
            make: makes the array; it is called again in the next run if this one is interrupted.
        """
        path = self.folder / f"{name}.npy"
        if not path.exists():
            temporary = path.with_suffix(".new")
            with temporary.open("wb") as file:
                np.save(file, make(), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return found
