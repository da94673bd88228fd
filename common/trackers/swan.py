"""SwanLab, by its own Lightning logger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from swanlab.integration.pytorch_lightning import (  # type: ignore[import-not-found,unused-ignore]
    SwanLabLogger,
)

from .base import Samples, keep_id, record_id, text
from .services import pixels


class SwanLab(SwanLabLogger):  # type: ignore[misc,unused-ignore]
    """SwanLab, or its files in the run's folder with `SWANLAB_MODE=local`.

    Args:
        output: folder of the run.
        project: SwanLab's project.
        name: of the run there.
    """

    def __init__(self, output: Path, project: str, name: str):
        self.output = output
        known, _ = record_id(output, "swanlab")
        super().__init__(
            project=project, experiment_name=name, log_dir=str(output / "swanlab"), save_dir=output, id=known,
            resume="allow",
        )  # fmt: skip

    def begin(self, facts: Mapping[str, str]) -> None:
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
