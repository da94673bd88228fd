"""Runs every script of `bench.py` with everything left out that makes data or trains, and prints the names it finds.

For the tests: what is tried are the scripts' options, the names of their results, and what they print last.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench
import sides

RUN = {
    "items": 8, "seconds": 2.0, "items_per_second": 4.0, "real_per_second": 8.0, "trained_tokens": 16,
    "compute_share": 0.9, "loss_first": 1.0, "loss_last": 0.5, "peak_rss_mb": 100, "cpu_seconds": 2.0,
    "other_cpu_seconds": 0.0, "counts": {"trained_tokens": 16, "real_seconds": 4.0}, "unit": "items", "calls": [],
    "per_second": 4.0, "peak_gb": 1.0, "mfu": 0.5, "first_step_after": 1.0, "kernels": "",
}  # fmt: skip
LEFT_OUT = {
    "whisper": ("rows_of",), "paraformer": ("peer_config", "model_directory"), "nemo_speech": ("model_file", "write"),
    "diffusion": ("prepare",), "scaling": ("prepare",),
}  # fmt: skip


def main() -> None:
    sides.alternate = lambda commands, *_: {name: [dict(RUN)] for name in commands}  # type: ignore[assignment]
    sides.make_workloads = sides.first_rows = lambda *_: None  # type: ignore[assignment]
    found = [name for comparison in bench.COMPARISONS for name in of(comparison)]
    print(json.dumps(found))


def of(comparison: bench.Comparison) -> Sequence[str]:
    """The names, as bench.py calls them, of what a script finds."""
    script, *arguments = comparison.script
    module = importlib.import_module(Path(script).stem)
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for name in LEFT_OUT.get(module.__name__, ()):
            stack.enter_context(patch.object(module, name))
        replace(module, stack)
        stack.enter_context(patch.object(sys, "argv", [script, *arguments, "--repeats", "1"]))
        stack.enter_context(contextlib.redirect_stdout(said))
        module.main()
    table = json.loads(said.getvalue().strip().splitlines()[-1])
    return [name for name, theirs in comparison.names.items() if theirs in table]


def replace(module: Any, stack: contextlib.ExitStack) -> None:
    """In place of the runs that a script starts itself."""
    if module.__name__ == "scaling":
        stack.enter_context(patch.object(module, "run", lambda *_: dict(RUN)))
    if module.__name__ == "nemo_speech":
        stack.enter_context(patch.object(module, "rows_of", lambda *_: []))
    if module.__name__ == "gpu":
        stack.enter_context(patch.object(module, "_need_device"))
        stack.enter_context(patch.object(module, "child", lambda *_: dict(RUN)))


if __name__ == "__main__":
    main()
