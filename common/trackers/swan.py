"""SwanLab, by its own Lightning logger."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swanlab.integration.pytorch_lightning import (  # type: ignore[import-not-found,unused-ignore]
    SwanLabLogger,
)

from .base import Samples, keep_id, record_id, text
from .services import pixels


class SwanLab(SwanLabLogger):  # type: ignore[misc,unused-ignore]
    """SwanLab, or its files in the run's folder with `SWANLAB_MODE=offline`.

    Args:
        output: folder of the run.
        project: SwanLab's project.
        name: of the run there.
    """

    _experiment: Any

    def __init__(self, output: Path, project: str, name: str):
        self.output = output
        known, _ = record_id(output, "swanlab")
        super().__init__(
            project=project, experiment_name=name, log_dir=str(output / "swanlab"), save_dir=output, id=known,
            resume="allow",
        )  # fmt: skip

    def begin(self, facts: Mapping[str, str]) -> None:
        with _own_interrupt():
            keep_id(self.output, "swanlab", str(self.experiment.id))
        self.log_hyperparams(dict(facts))

    def log_samples(self, samples: Samples, step: int) -> None:
        lines = [
            "\n".join(f"{key}: {text(v)}" for key, v in one.items() if not isinstance(v, bytes)) for one in samples
        ]
        self.log_text("samples", lines, step)
        pictures = [pixels(value) for sample in samples for value in sample.values() if isinstance(value, bytes)]
        if pictures:
            self.log_image("pictures", pictures, step)

    def log_checkpoint(self, path: Path, step: int) -> None:
        self.log_text("checkpoint", [str(path)], step)

    def finalize(self, status: str | None = None) -> None:
        """Close the record with the training, so that the next one of this process does not write into it."""
        if self._experiment is None:
            return
        with _own_interrupt():
            super().finalize(status)
            if status == "success":
                self._experiment.finish()
        self._experiment = None


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """SwanLab takes Ctrl-C for itself and closes the record at once; our run saves first, and tells it so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
