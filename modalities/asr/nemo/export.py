"""NeMo's recognisers for export: what the encoder gives, and the transcripts and error rates that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from ....common.data.processing import Batch
from ....common.exportable import Exportable, Output
from ....common.merging import merged
from ....common.task import Predicted
from .decoding import head_of
from .files import SAVED, connector, nemo_asr
from .streaming import set_context


class NemoExport(Exportable):
    """A model of NeMo's, whole or with an adapter. A runner is that model."""

    form: ClassVar[str] = "nemo"
    library: ClassVar[str] = "nemo"

    def trained(self) -> Any:
        return self.task.nemo

    def save(self, directory: Path) -> None:
        self.task.model = merged(self.task.model)
        self.task.save_pretrained(directory)

    def load(self, directory: Path) -> Any:
        options = {"map_location": torch.device("cpu"), "save_restore_connector": connector()}
        return nemo_asr().models.ASRModel.restore_from(str(directory / SAVED), **options).eval()

    @torch.no_grad()
    def outputs(self, runner: Any, data: dict[str, Any]) -> list[Output]:
        """The encoder's output of each recording, and its transcript."""
        self._take(runner)
        encoded, frames = self.task.encode(data)
        texts = self.task.head.texts(encoded, frames, data)
        rows = [row[:, :count].T.float().numpy() for row, count in zip(encoded, frames.tolist(), strict=True)]
        return [Output(row, text.strip()) for row, text in zip(rows, texts, strict=True)]

    def predict(self, runner: Any, batch: Batch) -> Predicted:
        """What the task makes of the runner's network."""
        self._take(runner)
        return self.own_predict(batch)

    def _take(self, runner: Any) -> None:
        task = self.task
        if runner is task.nemo:
            return
        task._nemo, recipe = [runner], task.recipe
        task.head = head_of(runner, task.processing.origin.name, recipe.model.joint_batch, recipe.evaluate)
        set_context(runner, recipe.evaluate)
