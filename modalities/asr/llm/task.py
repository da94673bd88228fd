"""The task of speech-LLMs: loss and transcription."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from ....common.losses import TokenLoss, linear_cross_entropy
from ....common.task import LossSum
from ..processing import IGNORED
from ..transformers_task import GeneratingTask
from .config import Config
from .model import load_model, states
from .processing import SpeechLlmProcessing


class Task(GeneratingTask):
    """Fine-tunes a speech-LLM: the whole, parts of it, or an adapter."""

    recipe: Config
    processing: SpeechLlmProcessing

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> SpeechLlmProcessing:
        return SpeechLlmProcessing(recipe, weights)

    def load(self) -> tuple[nn.Module, Any]:
        return load_model(self.recipe, self.weights)

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
