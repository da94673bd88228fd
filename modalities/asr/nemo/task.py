"""The task of NeMo's recognisers: their encoder and heads called directly, on our data path and loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....common.data.processing import Batch
from ....common.task import LossSum, Predicted
from ..task import SpeechTask
from .config import Config
from .decoding import head_of
from .files import SAVED
from .model import load_model
from .processing import NemoProcessing
from .streaming import set_context, stream


class Task(SpeechTask):
    """Trains a model of NeMo's: CTC, transducer or both, or Canary; the whole of it, its decoder, or an adapter."""

    recipe: Config
    processing: NemoProcessing
    model: Any

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = processing = self.make_processing(recipe, weights)
        pieces = None if processing.piece_folder is None else processing.piece_folder.name
        self.model, nemo = load_model(recipe, weights, processing.origin, processing.own, processing.tokens, pieces)
        self._nemo = [nemo]  # in a list, so that its parameters are not registered twice
        self.head = head_of(nemo, processing.origin.name, recipe.model.joint_batch, recipe.evaluate)
        self.log_names = self.head.names
        set_context(nemo, recipe.evaluate)

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> NemoProcessing:
        return NemoProcessing(recipe, weights)

    @property
    def nemo(self) -> Any:
        """NeMo's model inside."""
        return self._nemo[0]

    def compile_parts(self) -> None:
        for layer in getattr(self.nemo.encoder, "layers", [self.nemo.encoder]):
            layer.compile(dynamic=True)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """The model's own loss, as a sum and what it is a mean over."""
        with self._intermediate():
            return self._head_loss(*self.encode(data), data)

    def encode(self, data: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The encoder's output [B, D, T] and its frames [B]."""
        features, frames = data["features"].to(next(self.nemo.encoder.parameters()).dtype), data["frames"]
        if self.nemo.training and self.recipe.model.spec_augment and self.nemo.spec_augmentation is not None:
            features = self.nemo.spec_augmentation(input_spec=features, length=frames)
        if self._streams:
            return stream(self.nemo, features, frames)
        encoded, frames = self.nemo.encoder(audio_signal=features, length=frames)[:2]
        return encoded, frames

    def _head_loss(self, encoded: Tensor, frames: Tensor, data: dict[str, Any]) -> LossSum:
        losses, parts = self.head.losses(encoded, frames, data)
        if self._has_intermediate:
            texts = (data["tokens"], data["lengths"])
            losses, _ = self.nemo.add_interctc_losses(losses * 1.0, *texts, compute_wer=False)  # changes it in place
        carries, lengths = data["carries"], self.head.lengths(data)
        total, count = self.head.weighed(losses[carries], lengths[carries])
        logs = {
            name: float(self.head.weighed(part[carries], lengths[carries])[0].detach()) for name, part in parts.items()
        }
        return LossSum(total, count, logs)

    @property
    def _streams(self) -> bool:
        return not self.nemo.training and self.recipe.evaluate.streaming

    @property
    def _has_intermediate(self) -> bool:
        found = hasattr(self.nemo, "_interctc_params") and bool(self.nemo.is_interctc_enabled())
        return found and not self._streams

    @contextmanager
    def _intermediate(self) -> Iterator[None]:
        """Context in which the encoder keeps the layers whose output has a CTC loss of its own (`interctc`)."""
        if not self._has_intermediate:
            yield
            return
        from nemo.core.classes.mixins import AccessMixin

        AccessMixin.reset_registry(self.nemo)
        AccessMixin.set_access_enabled(access_enabled=True, guid=self.nemo.model_guid)
        try:
            yield
        finally:
            AccessMixin.reset_registry(self.nemo)
            AccessMixin.set_access_enabled(access_enabled=False, guid=self.nemo.model_guid)

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Transcripts of a batch, as `Scored` records, and its loss; the encoder runs once for both."""
        data = batch.data
        with self._intermediate():
            encoded, frames = self.encode(data)
            loss = self._head_loss(encoded, frames, data)
        texts = self.head.texts(encoded, frames, data)
        pairs = zip(data["utterances"], texts, strict=True)
        return Predicted([self.record(one, text.strip(), self.processing.language(one)) for one, text in pairs], loss)

    # ------------------------------------------------------------------ saving

    def exportable(self) -> Any:
        from .export import NemoExport

        return NemoExport(self)

    def save_pretrained(self, directory: Path) -> None:
        if self.model is not self.nemo:
            self.model.save_pretrained(directory)
            return
        self.nemo.save_to(str(directory / SAVED))
