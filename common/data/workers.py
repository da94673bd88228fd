"""Data workers that are gone."""

from __future__ import annotations

import os
import traceback


def lost(error: BaseException) -> bool:
    """Whether a data worker has gone: torch says so, or a batch could not be fetched from it any more.

    torch says it by a signal, which raises its RuntimeError wherever the main thread happens to be.
    """
    text = str(error)
    if isinstance(error, RuntimeError):
        return "DataLoader worker" in text and ("killed by signal" in text or "exited unexpectedly" in text)
    if not isinstance(error, OSError | EOFError) or "in DataLoader worker" in text:  # the latter: one that it met
        return False
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    fetched = any(file.endswith(os.path.join("utils", "data", "dataloader.py")) for file in files)
    return fetched and any(os.path.dirname(file).endswith("multiprocessing") for file in files)
