"""What the tasks of transformers' recognisers share: a model inside an adapter, and transcripts that are generated."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.data.processing import Batch
from ...common.task import Predicted, compile_layers
from .processing import IGNORED, GeneratingProcessing
from .task import SpeechTask


class TransformersTask(SpeechTask):
    """A recogniser of transformers, which is trained itself or with an adapter. A subclass defines `load`, too."""

    model: Any

    def __init__(self, recipe: Any, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        self.model, speech = self.load()
        self._speech = [speech]  # in a list, so that its parameters are not registered twice

    @abstractmethod
    def load(self) -> tuple[nn.Module, Any]:
        """(what is trained, transformers' model inside): the model itself, or a PEFT model around it."""

    @property
    def speech(self) -> Any:
        """transformers' model inside."""
        return self._speech[0]

    def compile_parts(self) -> None:
        compile_layers(self.speech)


class GeneratingTask(TransformersTask):
    """A recogniser that writes transcripts token by token. A subclass defines `load`, `loss` and `transcribe`."""

    processing: GeneratingProcessing

    @abstractmethod
    def transcribe(self, data: dict[str, Any]) -> list[str]:
        """What is said in each row of a batch."""

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Transcripts of a batch, as `Scored` records, and the loss of those rows whose text is known."""
        data, processing = batch.data, self.processing
        records = [
            self.record(utterance, text, processing.language(utterance))
            for utterance, text in zip(data["utterances"], self.transcribe(data), strict=True)
        ]
        return Predicted(records, self.loss(data) if bool((data["labels"] != IGNORED).any()) else None)

    def save_pretrained(self, directory: Path) -> None:
        processor = self.processing.processor
        self.model.save_pretrained(directory)
        processor.save_pretrained(directory)
        # transformers 5 puts these settings into processor_config.json only; other programs read them here.
        processor.feature_extractor.save_pretrained(directory)
        self.speech.generation_config.save_pretrained(directory)
