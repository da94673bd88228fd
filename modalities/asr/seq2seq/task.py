"""The encoder-decoder task: loss, transcription, saving."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....common.data.processing import Batch
from ....common.losses import TokenLoss, token_loss
from ....common.task import LossSum, Predicted, compile_layers
from ..task import SpeechTask
from .config import Config
from .model import decode, groups, heard, load_model
from .processing import IGNORED, Seq2SeqProcessing


class Task(SpeechTask):
    """Fine-tunes an encoder-decoder model: the whole, its decoder, or an adapter."""

    recipe: Config
    processing: Seq2SeqProcessing
    model: Any

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        self.model, speech = load_model(recipe, weights)
        self._speech = [speech]  # in a list, so that its parameters are not registered twice

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> Seq2SeqProcessing:
        return Seq2SeqProcessing(recipe, weights)

    @property
    def speech(self) -> Any:
        """transformers' model inside."""
        return self._speech[0]

    def compile_parts(self) -> None:
        compile_layers(self.speech)

    def train_mode(self) -> None:
        super().train_mode()
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and self.recipe.model.batch_norm == "keep":
                module.eval()

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Cross-entropy of the transcripts' tokens and their end tokens."""
        asked = data["labels"] != IGNORED
        hidden = decode(self.speech, data["features"], data["lengths"], data["input_ids"])
        # Only places that carry loss are projected onto the vocabulary.
        logits = self.speech.get_output_embeddings()(hidden[asked]).float()
        kind = TokenLoss(smoothing=self.recipe.task.label_smoothing)
        return LossSum(token_loss(logits, data["labels"][asked], kind), int(asked.sum()))

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Transcripts of a batch, as `Scored` records, and the loss of those rows whose text is known."""
        data = batch.data
        records = []
        for utterance, text in zip(data["utterances"], self.transcribe(data), strict=True):
            records.append(self.record(utterance, text, self.processing.language(utterance)))
        return Predicted(records, self.loss(data) if bool((data["labels"] != IGNORED).any()) else None)

    def transcribe(self, data: dict[str, Any]) -> list[str]:
        """What is said in each row of a batch."""
        section, settings = self.recipe.evaluate, deepcopy(self.speech.generation_config)
        prompts, end = data["prompts"], self.processing.end
        settings.max_length = prompts.shape[1] + min(section.max_new_tokens, self.processing.most - prompts.shape[1])
        settings.max_new_tokens, settings.do_sample, settings.num_beams = None, False, section.num_beams
        settings.eos_token_id, settings.pad_token_id = end, end
        settings.forced_bos_token_id = None  # the prompt says it
        texts = [""] * len(prompts)
        for rows in groups(self.speech, data["lengths"]):
            with heard(self.speech, data["features"][rows], data["lengths"][rows]) as inputs:
                ids = self.speech.generate(**inputs, decoder_input_ids=prompts[rows], generation_config=settings)
            for row, found in zip(rows, ids[:, prompts.shape[1] :].tolist(), strict=True):
                texts[row] = self.processing.tokenizer.decode(found, skip_special_tokens=True).strip()
        return texts

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, directory: Path) -> None:
        processor = self.processing.processor
        self.model.save_pretrained(directory)
        processor.save_pretrained(directory)
        # transformers 5 puts these settings into processor_config.json only; other programs read them here.
        processor.feature_extractor.save_pretrained(directory)
        self.speech.generation_config.save_pretrained(directory)
