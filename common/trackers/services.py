"""TensorBoard, MLflow and W&B, by Lightning's own loggers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from .base import Samples, keep_id, record_id, text


class TensorBoard(TensorBoardLogger):
    """Event files in `OUT/tensorboard`.

    Args:
        output: folder of the run.
        start: optimizer steps done; points of later ones, left by a run that was killed, are struck out.
    """

    def __init__(self, output: Path, start: int):
        super().__init__(output, name="", version="tensorboard", purge_step=start + 1)
        self._start = start

    def begin(self, facts: Mapping[str, str]) -> None:
        rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items())
        writer: Any = self.experiment
        writer.add_text("run", f"| | |\n| --- | --- |\n{rows}", self._start)

    def log_samples(self, samples: Samples, step: int) -> None:
        writer: Any = self.experiment
        for number, sample in enumerate(samples):
            lines = [f"**{key}** {_cell(value)}" for key, value in sample.items() if not isinstance(value, bytes)]
            writer.add_text(f"samples/{number}", "\n\n".join(lines), step)
            for key, value in sample.items():
                if isinstance(value, bytes):
                    writer.add_image(f"samples/{number}/{key}", pixels(value), step, dataformats="HWC")

    def log_checkpoint(self, path: Path, step: int) -> None:
        writer: Any = self.experiment
        writer.add_text("checkpoint", str(path), step)


def _cell(value: Any) -> str:
    """A text within a table or a paragraph of Markdown."""
    return text(value).replace("|", "\\|").replace("\n", " ⏎ ")


def pixels(png: bytes) -> Any:
    """[H, W, 3] uint8"""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(BytesIO(png)).convert("RGB"))


class Mlflow(MLFlowLogger):
    """An MLflow server, or a database in the run's folder.

    Args:
        output: folder of the run.
        project: MLflow's experiment.
        name: of the run there.
        uri: of the server; default: `MLFLOW_TRACKING_URI`, else `OUT/mlflow.db`.
    """

    def __init__(self, output: Path, project: str, name: str, uri: str | None):
        self.output = output
        known, self._resumed = record_id(output, "mlflow")
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        super().__init__(
            project,
            name,
            uri or f"sqlite:///{output / 'mlflow.db'}",
            run_id=known if self._resumed else None,
            artifact_location=None if uri else (output / "mlflow").as_uri(),
        )

    def begin(self, facts: Mapping[str, str]) -> None:
        client: Any = self.experiment
        run = str(self.run_id)
        keep_id(self.output, "mlflow", run)
        if self._resumed:  # what was said once can't be changed there, and is in the folder in any case
            client.update_run(run, status="RUNNING")
            return
        self.log_hyperparams({re.sub(r"[^\w/. -]", "_", name): value for name, value in facts.items()})
        client.log_dict(run, dict(facts), "run.json")

    def log_samples(self, samples: Samples, step: int) -> None:
        client: Any = self.experiment
        shown = [{key: v for key, v in sample.items() if not isinstance(v, bytes)} for sample in samples]
        name = f"samples/step-{step:08d}"
        written = json.dumps(shown, indent=1, ensure_ascii=False, default=str)
        client.log_text(str(self.run_id), written, f"{name}.json")
        for number, sample in enumerate(samples):
            for key, value in sample.items():
                if isinstance(value, bytes):
                    client.log_image(str(self.run_id), pixels(value), f"{name}-{number}-{key}.png")

    def log_checkpoint(self, path: Path, step: int) -> None:
        client: Any = self.experiment
        client.set_tag(str(self.run_id), "checkpoint", str(path))


class Wandb(WandbLogger):
    """W&B, or its files in the run's folder with `WANDB_MODE=offline`.

    Args:
        output: folder of the run.
        project: W&B's project.
        name: of the run there.
    """

    def __init__(self, output: Path, project: str, name: str):
        self.output = output
        known, _ = record_id(output, "wandb")
        super().__init__(name=name, save_dir=output, id=known, project=project)

    def begin(self, facts: Mapping[str, str]) -> None:
        run: Any = self.experiment
        keep_id(self.output, "wandb", str(run.id))
        self.log_hyperparams(dict(facts))

    def log_samples(self, samples: Samples, step: int) -> None:
        import wandb

        names = list(dict.fromkeys(key for sample in samples for key in sample))
        rows = [[self._shown(wandb, sample.get(name)) for name in names] for sample in samples]
        self.log_table("samples", names, rows, step=step)

    @staticmethod
    def _shown(wandb: Any, value: Any) -> Any:
        return wandb.Image(pixels(value)) if isinstance(value, bytes) else None if value is None else text(value)

    def log_checkpoint(self, path: Path, step: int) -> None:
        run: Any = self.experiment
        run.summary["checkpoint"] = str(path)

    def finalize(self, status: str) -> None:
        """Close the record with the training, so that the next one of this process does not write into it."""
        super().finalize(status)
        run: Any = self._experiment
        if run is not None:
            run.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None
