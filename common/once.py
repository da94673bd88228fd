"""Making files once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

MARKER = "prepared.json"


def made_once(root: Path, settings: Mapping[str, object], make: Callable[[], object]) -> bool:
    """Call `make` unless its files are all under `root` already, made with the same settings.

    Args:
        root: folder of what is made; holds the marker.
        settings: what the files depend on, such as a version and a seed.
        make: makes them; if it is interrupted, the next call makes them again.

    Returns:
        whether anything was made.
    """
    marker = root / MARKER
    if _read(marker) == settings:
        return False
    marker.unlink(missing_ok=True)
    make()
    marker.write_text(json.dumps(settings), encoding="utf-8")
    return True


def _read(marker: Path) -> object:
    try:
        return json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
