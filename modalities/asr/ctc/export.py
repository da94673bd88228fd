"""CTC models for export: logits of recordings, each alone, and the transcripts and error rates that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ....common.data.processing import Batch
from ....common.exportable import Exportable, Output
from ....common.merging import merged
from ....common.task import Predicted
from .model import frames


class TorchCtc:
    """A CTC model of transformers as a runner."""

    def __init__(self, ctc: Any):
        self.ctc = ctc.eval()

    @torch.no_grad()
    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Logits [T, V] of one recording: samples [1, N], or features [1, T, F]."""
        given = torch.from_numpy(features).to(self.ctc.device, self.ctc.dtype)
        found: np.ndarray = self.ctc(given).logits[0].float().cpu().numpy()
        return found


class CtcExport(Exportable):
    """A CTC model, whole or with an adapter."""

    form: ClassVar[str] = "ctc"

    def trained(self) -> TorchCtc:
        return TorchCtc(self.task.speech)

    def save(self, directory: Path) -> None:
        self.task.model = merged(self.task.model)
        self.task.save_pretrained(directory)

    def load(self, directory: Path) -> TorchCtc:
        from transformers import AutoModelForCTC

        return TorchCtc(AutoModelForCTC.from_pretrained(directory, dtype="auto"))

    def load_adapter(self, directory: Path) -> TorchCtc:
        from peft import PeftModel
        from transformers import AutoModelForCTC

        size = {"vocab_size": self.task.speech.config.vocab_size, "ignore_mismatched_sizes": True}  # it may have grown
        base: Any = AutoModelForCTC.from_pretrained(self.task.recipe.model.path, dtype="auto", **size)
        return TorchCtc(PeftModel.from_pretrained(base, str(directory)).get_base_model())

    def outputs(self, runner: Any, data: dict[str, Any]) -> list[Output]:
        """Logits of each piece of a batch, and its transcript."""
        rows, counts = self.heard(runner, data["features"], data["lengths"])
        kept = [row[:count].numpy() for row, count in zip(rows, counts.tolist(), strict=True)]
        return [Output(row, self.task.processing.labels.decode(row.argmax(-1).tolist())) for row in kept]

    def heard(self, runner: Any, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As `model.run` gives it: logits [B, T, V] and the frames [B], with a runner, which hears each row alone."""
        given = features.float().cpu().numpy()
        rows = [runner(given[row : row + 1, :length]) for row, length in enumerate(lengths.tolist())]
        counts = torch.minimum(frames(self.task.speech.config, lengths.cpu()), torch.tensor([len(row) for row in rows]))
        return nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True), counts

    def predict(self, runner: Any, batch: Batch) -> Predicted:
        """Transcripts and loss by the runner's logits."""
        given = vars(self.task)
        given["run"] = lambda features, lengths: self.heard(runner, features, lengths)
        try:
            return self.own_predict(batch)
        finally:
            del given["run"]
