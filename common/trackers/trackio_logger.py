"""trackio, whose calls are those of W&B; it has no Lightning logger of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio  # type: ignore[import-not-found,unused-ignore]
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from .base import Samples, keep_id, record_id, text


class Trackio(Logger):
    """trackio's own database on this machine, or the space that `TRACKIO_SPACE_ID` names.

    Args:
        output: folder of the run.
        project: trackio's project.
        name: of the run there; its number follows, as trackio knows runs by name.
    """

    def __init__(self, output: Path, project: str, name: str):
        super().__init__()
        self.output, self.project = output, project
        known, there = record_id(output, "trackio")
        self._name = str(known) if there else f"{name}-{str(known)[:6]}"
        self._run: Any = None

    @property
    def name(self) -> str:
        return self.project

    @property
    def version(self) -> str:
        return self._name

    def begin(self, facts: Mapping[str, str]) -> None:
        self._run = trackio.init(self.project, name=self._name, config=dict(facts), resume="allow", embed=False)
        keep_id(self.output, "trackio", self._name)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._run.log(dict(metrics), step=step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """They are given when the record is opened."""

    def log_samples(self, samples: Samples, step: int) -> None:
        rows = [
            {key: f"a picture ({len(v)} bytes)" if isinstance(v, bytes) else text(v) for key, v in one.items()}
            for one in samples
        ]
        table = trackio.Table(data=rows)  # type: ignore[arg-type,unused-ignore]
        self._run.log({"samples": table}, step=step)

    def log_checkpoint(self, path: Path, step: int) -> None:
        self._run.log({"checkpoint": str(path)}, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
