"""The task of speech-LLMs: loss, transcription, saving."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from ....common.data.processing import Batch
from ....common.losses import TokenLoss, linear_cross_entropy
from ....common.task import LossSum, Predicted, compile_layers
from ..task import SpeechTask
from .config import Config
from .model import load_model, states
from .processing import IGNORED, SpeechLlmProcessing


class Task(SpeechTask):
    """Fine-tunes a speech-LLM: the whole, parts of it, or an adapter."""

    recipe: Config
    processing: SpeechLlmProcessing
    model: Any

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        self.model, speech = load_model(recipe, weights)
        self._speech = [speech]  # in a list, so that its parameters are not registered twice

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> SpeechLlmProcessing:
        return SpeechLlmProcessing(recipe, weights)

    @property
    def speech(self) -> Any:
        """transformers' model inside."""
        return self._speech[0]

    def compile_parts(self) -> None:
        compile_layers(self.speech)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Cross-entropy of the answers' tokens and their end tokens."""
        following = data["labels"][:, 1:]
        asked = following != IGNORED
        hidden = states(self.speech, data["input_ids"], data["mask"], data["heard"])[:, :-1]
        # Only places that carry loss are projected onto the vocabulary: few beside the audio's.
        weight, kind = self.speech.lm_head.weight, TokenLoss(smoothing=self.recipe.task.label_smoothing)
        return LossSum(linear_cross_entropy(hidden[asked], weight, following[asked], kind), int(asked.sum()))

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Transcripts of a batch, as `Scored` records, and the loss of those rows whose text is known."""
        data = batch.data
        records = [
            self.record(utterance, text, self.processing.language(utterance))
            for utterance, text in zip(data["utterances"], self.transcribe(data), strict=True)
        ]
        return Predicted(records, self.loss(data) if bool((data["labels"] != IGNORED).any()) else None)

    def transcribe(self, data: dict[str, Any]) -> list[str]:
        """What the model answers in each row of a batch."""
        section, settings = self.recipe.evaluate, deepcopy(self.speech.generation_config)
        settings.max_length, settings.max_new_tokens = None, section.max_new_tokens
        settings.do_sample, settings.num_beams = False, section.num_beams
        settings.temperature = settings.top_p = settings.top_k = None
        tokenizer = self.processing.tokenizer
        settings.eos_token_id = settings.eos_token_id or tokenizer.eos_token_id
        settings.pad_token_id = tokenizer.pad_token_id or 0
        ids = self.speech.generate(
            input_ids=data["prompts"], attention_mask=data["prompt_mask"], generation_config=settings, **data["heard"]
        )
        new = ids[:, data["prompts"].shape[1] :].tolist()
        return [tokenizer.decode(found, skip_special_tokens=True).strip() for found in new]

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, directory: Path) -> None:
        processor = self.processing.processor
        self.model.save_pretrained(directory)
        processor.save_pretrained(directory)
        # transformers 5 puts these settings into processor_config.json only; other programs read them here.
        processor.feature_extractor.save_pretrained(directory)
        self.speech.generation_config.save_pretrained(directory)
