"""The encoder-decoder task: loss and transcription."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from ....common.losses import TokenLoss, token_loss
from ....common.task import LossSum
from ..processing import IGNORED
from ..real_norm import keep_statistics
from ..transformers_task import GeneratingTask
from .config import Config
from .model import decode, groups, heard, load_model
from .processing import Seq2SeqProcessing


class Task(GeneratingTask):
    """Fine-tunes an encoder-decoder model: the whole, its decoder, or an adapter."""

    recipe: Config
    processing: Seq2SeqProcessing

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> Seq2SeqProcessing:
        return Seq2SeqProcessing(recipe, weights)

    def load(self) -> tuple[nn.Module, Any]:
        return load_model(self.recipe, self.weights)

    def train_mode(self) -> None:
        super().train_mode()
        if self.recipe.model.batch_norm == "keep":
            keep_statistics(self)

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
