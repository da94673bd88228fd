"""What the user sees: one console, quiet libraries, live lines on a terminal and plain ones elsewhere."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console(stderr=False, soft_wrap=True)
EVERY = 15.0
"""Seconds between two plain progress lines where the output is no terminal."""


def is_first_rank() -> bool:
    """Whether this process is the one that talks and writes."""
    if "RANK" in os.environ:  # torchrun
        return os.environ["RANK"] == "0"
    if "LOCAL_RANK" in os.environ:  # Lightning's own children, which inherit a SLURM job's variables
        return os.environ["LOCAL_RANK"] == os.environ.get("NODE_RANK", "0") == "0"
    return os.environ.get("SLURM_PROCID", "0") == "0"


def set_up(debug: bool = False) -> None:
    """Our log through Rich, other libraries' at warnings; offline where the environment says so."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not debug:  # read when transformers and the hub are imported
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False, rich_tracebacks=debug)
    logger = logging.getLogger(__package__.split(".")[0])
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO if is_first_rank() else logging.ERROR)
    logger.propagate = False
    if debug:
        return
    warnings.filterwarnings("ignore", module=r"lightning(\.|_|$).*")
    warnings.filterwarnings("ignore", module=r"torch\.utils\.data.*")


def quiet_lightning() -> None:
    """Keep Lightning's notices down, unless debugging. Its import sets their level, so this comes after it."""
    if logging.getLogger(__package__.split(".")[0]).level > logging.DEBUG:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def progress(title: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
    """Progress of something that takes more than a few seconds: gives a function to call with (done, total)."""
    if not is_first_rank():
        yield _nothing
        return
    if console.is_terminal:
        columns = (TextColumn(f"{title}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=None)

            def live(done: int, total: int | None = None) -> None:
                bar.update(task, completed=done, total=total)

            yield live
        return
    last = time.monotonic()

    def plain(done: int, total: int | None = None) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            console.print(f"{title}: {done}{f' of {total}' if total else ''} {unit}", highlight=False)

    yield plain


def _nothing(done: int, total: int | None = None) -> None:
    """Progress of a rank that does not talk."""


def duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `3:07 min`, `2:05 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
