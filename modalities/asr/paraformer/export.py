"""Paraformer and SenseVoice for export: scores of each token or frame, and the transcripts and error rates that
follow."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ....common.data.processing import Batch
from ....common.errors import ExportError
from ....common.exportable import Exportable, Output
from ....common.merging import merged
from ....common.task import Predicted
from .directory import quiet
from .sensevoice import scores as frame_scores


class ParaformerExport(Exportable):
    """Paraformer, whole or with an adapter. A runner is FunASR's model."""

    form: ClassVar[str] = "paraformer"
    library: ClassVar[str] = "funasr"

    def trained(self) -> Any:
        return self.task.paraformer

    def save(self, directory: Path) -> None:
        self.task.model = merged(self.task.model)
        self.task.save_pretrained(directory)

    def load(self, directory: Path) -> Any:
        from funasr import AutoModel  # type: ignore[import-untyped]

        with quiet(), torch.random.fork_rng():  # it seeds all generators
            options = {"device": "cpu", "ncpu": torch.get_num_threads(), "disable_update": True, "disable_pbar": True}
            return AutoModel(model=str(directory), **options).model.eval()

    def runner_of(self, model: Any) -> Any:
        """FunASR's decoding around a graph, which gives log-probabilities [L, V] of features [1, T, F].

        Raises:
            ExportError: the recipe decodes with the CTC head, which graphs don't have.
        """
        if self.task.recipe.evaluate.decoding_ctc_weight:
            raise ExportError(
                "the graph has no CTC head", where="evaluate.decoding_ctc_weight", expected=0,
                do="evaluate.decoding_ctc_weight=0",
            )  # fmt: skip

        def scored(features: Tensor, lengths: Tensor) -> tuple[Any, ...]:
            rows = torch.from_numpy(model(features.float().numpy()))[None]
            return rows, torch.tensor([float(rows.shape[1])]), None, None

        decoding = copy(self.task.paraformer)
        decoding.is_graph = True
        decoding.encode = lambda features, lengths, **_: (features, lengths)
        decoding.calc_predictor = scored
        decoding.cal_decoder_with_predictor = lambda features, lengths, rows, number: (rows, number)
        return decoding

    def outputs(self, runner: Any, data: dict[str, Any]) -> list[Output]:
        """Log-probabilities of each token (SenseVoice: frame), and the transcript."""
        self._take(runner)
        found, each = [], (data["speech"], data["speech_lengths"].tolist(), data["utterances"])
        for features, length, utterance in zip(*each, strict=True):
            scores = self.scores(runner, features[:length])
            text = self.task.transcribe(features[:length], utterance)
            found.append(Output(scores, text, tuple(scores.argmax(-1).tolist())))
        return found

    @torch.no_grad()
    def scores(self, runner: Any, features: Tensor) -> np.ndarray:
        """Log-probabilities [L, V] of the L tokens that are found in features [T, F]; of SenseVoice, of its frames."""
        if self.task.senses:
            answered: np.ndarray = frame_scores(runner, features).float().numpy()
            return answered
        encoded, lengths = runner.encode(features[None], torch.tensor([len(features)]))
        embedded, number = runner.calc_predictor(encoded, lengths)[:2]
        number = number.round().long()
        if int(number) < 1:
            return np.zeros((0, len(self.task.processing.tokens)), dtype=np.float32)
        decoded = runner.cal_decoder_with_predictor(encoded, lengths, embedded, number)[0]
        found: np.ndarray = decoded[0, : int(number)].float().numpy()
        return found

    def predict(self, runner: Any, batch: Batch) -> Predicted:
        """What the task makes of the runner's network; of a graph no loss, which needs its parts."""
        self._take(runner)
        if getattr(runner, "is_graph", False):
            return Predicted(self.task.heard(batch), None)
        return self.own_predict(batch)

    def _take(self, runner: Any) -> None:
        self.task._paraformer = [runner]
