"""The CTC task: loss, transcription, scores, saving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....common.data.processing import Batch
from ....common.errors import CheckpointError
from ....common.task import LossSum, Predicted
from ..losses import ctc
from ..real_norm import keep_statistics
from ..text import is_unsegmented
from ..transformers_task import TransformersTask
from .beam import BeamSearch
from .config import Config
from .decode import timed_words
from .model import load_model, run
from .processing import CtcProcessing


class Task(TransformersTask):
    """Fine-tunes a CTC model: the whole, its output layer, or an adapter."""

    recipe: Config
    processing: CtcProcessing

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self._searches: dict[bool, BeamSearch] = {}

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> CtcProcessing:
        return CtcProcessing(recipe, weights)

    def load(self) -> tuple[nn.Module, Any]:
        return load_model(self.recipe, self.weights, self.processing.vocabulary)

    def train_mode(self) -> None:
        super().train_mode()
        if self.recipe.model.batch_norm == "keep":
            keep_statistics(self)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """CTC loss of the transcripts; what is counted are their labels."""
        logits, frames = self.run(data["features"], data["lengths"])
        loss = self._ctc_loss(logits, frames, data)
        if self.training and self.recipe.model.layerdrop:  # DDP waits for the gradients of layers that were left out
            loss = LossSum(loss.sum + self._zero(), loss.count)
        return loss

    def _ctc_loss(self, logits: Tensor, frames: Tensor, data: dict[str, Any]) -> LossSum:
        asked = data["label_lengths"] > 0
        blank, lengths = self.processing.labels.blank, data["label_lengths"][asked]
        total = ctc(logits[asked], frames[asked], data["labels"], lengths, blank) if len(lengths) else logits.sum() * 0
        return LossSum(total, int(lengths.sum()))

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Transcripts of a batch, as `Scored` records, and its loss where it can be had."""
        data = batch.data
        logits, frames = self.heard(data)
        records = []
        for row, count, utterance in zip(logits, frames.tolist(), data["utterances"], strict=True):
            language = utterance.language or self.recipe.task.language
            text, words = self.transcribe(row[:count], language)
            records.append(self.record(utterance, text, language, words))
        return Predicted(records, self._ctc_loss(logits, frames, data))

    def run(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] of padded inputs, and their frames [B]."""
        return run(self.speech, features, lengths)

    def heard(self, data: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] of a batch's utterances and their frames [B]; of pieces, what is kept of them, joined."""
        logits, frames = self.run(data["features"], data["lengths"])
        pieces = [piece for utterance in data["pieces"] for piece in utterance]
        if len(pieces) == len(data["pieces"]):
            return logits, frames
        kept = [
            row[piece.begin : count if piece.end is None else piece.end]
            for row, count, piece in zip(logits, frames.tolist(), pieces, strict=True)
        ]
        rows, at = [], 0
        for utterance in data["pieces"]:
            rows.append(torch.cat(kept[at : at + len(utterance)]))
            at += len(utterance)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows]).to(frames)

    def transcribe(self, logits: Tensor, language: str | None) -> tuple[str, Sequence[Any]]:
        """Text and timed words of an utterance's logits [T, V]."""
        ids = logits.argmax(-1).tolist()
        hearing, labels = self.processing.hearing, self.processing.labels
        words = timed_words(ids, labels, hearing.samples_per_frame / hearing.rate, language)
        if self.recipe.evaluate.num_beams == 1:
            return labels.decode(ids), words
        alone = is_unsegmented(language)
        if alone not in self._searches:
            self._searches[alone] = BeamSearch(labels, logits.shape[-1], self.recipe.evaluate, alone)
        return self._searches[alone](logits.float().log_softmax(-1).cpu().numpy()), words

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, directory: Path) -> None:
        import transformers
        from transformers.models.auto import processing_auto

        names: Any = processing_auto.__dict__["PROCESSOR_MAPPING_NAMES"]

        tokenizer, extractor = self.processing.vocabulary.tokenizer, self.processing.hearing.extractor
        # PEFT would look for embeddings of tokens, which these models have not, where the vocabulary has grown.
        self.model.save_pretrained(directory, **({} if self.model is self.speech else {"save_embedding_layers": False}))
        name = names.get(self.speech.config.model_type) or "Wav2Vec2Processor"
        getattr(transformers, name)(extractor, tokenizer).save_pretrained(directory)
        # transformers 5 puts these settings into processor_config.json only; other programs read them here.
        extractor.save_pretrained(directory)
        if self.recipe.model.train_adapter:
            self._save_adapter(directory)

    def exportable(self) -> Any:
        from .export import CtcExport

        return CtcExport(self)

    def _save_adapter(self, directory: Path) -> None:
        """MMS's form: adapter and output layer in a file of their own, beside the whole model."""
        from safetensors.torch import save_file

        section = self.recipe
        language = section.model.language or section.task.language or "new"
        tensors = {name: value.detach().contiguous() for name, value in self.speech._get_adapters().items()}
        save_file(tensors, directory / f"adapter.{language}.safetensors", metadata={"format": "pt"})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["vocabulary"] = self.processing.vocabulary.tokens

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["vocabulary"] != self.processing.vocabulary.tokens:
            raise CheckpointError(
                "the vocabulary is another now than when the run was stopped",
                where="data.train",
                given=f"{len(self.processing.vocabulary.tokens)} tokens",
                expected=f"{len(checkpoint['vocabulary'])} tokens",
                do="bring the training text back, or start another run (train.fresh=true)",
            )
        super().on_load_checkpoint(checkpoint)
