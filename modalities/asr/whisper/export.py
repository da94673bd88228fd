"""Whisper for export: transcripts of mel features, and the error rates that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ....common.data.processing import Batch
from ....common.exportable import Exportable, Output, Rules, Spoken
from ....common.merging import merged
from ....common.task import Predicted
from .model import encode

FORBIDDEN = -1e4
"""Logits below this stand for minus infinity; runtimes have different ones."""


class TorchWhisper:
    """Whisper of transformers as a runner.

    Args:
        whisper: the model.
        end: id of the token that ends a transcript.
    """

    def __init__(self, whisper: Any, end: int):
        self.whisper, self.end = whisper.eval(), end

    @torch.no_grad()
    def transcribe(
        self, features: np.ndarray, prompts: Sequence[Sequence[int]], most: int, rules: Rules
    ) -> list[Spoken]:
        """The most probable transcripts of mel features [B, F, T], each after its decoder prompt."""
        encoded = encode(self.whisper, torch.from_numpy(features).to(self.whisper.device, self.whisper.dtype))
        return [self._one(encoded[row][None], prompt, most, rules) for row, prompt in enumerate(prompts)]

    def _one(self, encoded: torch.Tensor, prompt: Sequence[int], most: int, rules: Rules) -> Spoken:
        from transformers import GenerationConfig, GenerationMixin
        from transformers.generation.logits_process import LogitsProcessorList
        from transformers.modeling_outputs import BaseModelOutput

        def forbid(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(rules(ids[0, len(prompt) :].tolist(), logits[0].float().numpy()))[None]

        found = GenerationMixin.generate(
            self.whisper,
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            decoder_input_ids=torch.tensor([list(prompt)]),
            logits_processor=LogitsProcessorList([forbid]),
            generation_config=GenerationConfig(
                max_length=len(prompt) + most, eos_token_id=self.end, pad_token_id=self.end, do_sample=False,
                output_scores=True, return_dict_in_generate=True,
            ),
        )  # fmt: skip
        ids = found.sequences[0, len(prompt) :].tolist()
        logits = torch.cat(found.scores).float().numpy()
        return Spoken([token for token in ids if token != self.end], logits)


class WhisperExport(Exportable):
    """Whisper, whole or with an adapter."""

    form: ClassVar[str] = "speech_seq2seq"

    def __init__(self, task: Any):
        super().__init__(task)
        whole = task.recipe.evaluate.model_copy(update={"audio_context": "full"})  # as it is served
        task.processing.recipe = task.processing.recipe.model_copy(update={"evaluate": whole})

    @property
    def end(self) -> int:
        """Id of the token that ends a transcript."""
        return int(self.task.processing.targets.end)

    def trained(self) -> TorchWhisper:
        return TorchWhisper(self.task.whisper, self.end)

    def save(self, directory: Path) -> None:
        task = self.task
        settings = task.generation_config()
        merged(task.model).save_pretrained(directory)
        task.processing.processor.save_pretrained(directory)
        task.processing.processor.feature_extractor.save_pretrained(directory)  # where other programs read it
        settings.save_pretrained(directory)

    def load(self, directory: Path) -> TorchWhisper:
        from transformers import WhisperForConditionalGeneration

        return TorchWhisper(WhisperForConditionalGeneration.from_pretrained(directory, dtype="auto"), self.end)

    def load_adapter(self, directory: Path) -> TorchWhisper:
        from peft import PeftModel
        from transformers import WhisperForConditionalGeneration

        base = WhisperForConditionalGeneration.from_pretrained(self.task.recipe.model.path, dtype="auto")
        return TorchWhisper(PeftModel.from_pretrained(base, str(directory)).get_base_model(), self.end)

    def rules(self, begin: int) -> Rules:
        """What the generation config forbids, and the order of times where the model writes them.

        Args:
            begin: tokens of the decoder's prompt.
        """
        from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

        config = self.task.generation_config()
        never, first = list(config.suppress_tokens or ()), list(config.begin_suppress_tokens or ())
        times = None
        if self.task.recipe.task.timestamps:
            times = WhisperTimeStampLogitsProcessor(config, begin_index=begin)

        def apply(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
            kept = logits.copy()
            kept[never] = -np.inf
            if not ids:
                kept[first] = -np.inf
            if times is None:
                return kept
            before = torch.tensor([[0] * begin + list(ids)])
            timed: np.ndarray = times(before, torch.from_numpy(kept)[None])[0].numpy()
            return timed

        return apply

    def spoken(self, runner: Any, data: dict[str, Any]) -> list[Spoken]:
        """What a runner writes for each recording of a batch."""
        positions, asked = self.task.whisper.config.max_target_positions, self.task.recipe.evaluate.max_new_tokens
        features, found = data["features"].float().cpu().numpy(), []
        for row, prompt in enumerate(data["prefixes"]):
            most = min(asked, positions - len(prompt))
            given = features[row : row + 1], [list(prompt)], most, self.rules(len(prompt))
            found += runner.transcribe(*given)
        return found

    def outputs(self, runner: Any, data: dict[str, Any]) -> list[Output]:
        """Logits of each step, and the transcript."""
        found = []
        for one in self.spoken(runner, data):
            numbers = np.where(one.logits > FORBIDDEN, one.logits, 0.0).astype(np.float32)
            found.append(Output(numbers, self.task.text(one.ids), tuple(one.ids)))
        return found

    def predict(self, runner: Any, batch: Batch) -> Predicted:
        """Transcripts by the runner, scored as the task scores its own; no loss."""
        spoken = [one.ids for one in self.spoken(runner, batch.data)]
        return Predicted(self.task.records(batch.data, spoken), None)
