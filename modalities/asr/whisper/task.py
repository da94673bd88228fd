"""The Whisper task: loss, transcription, scores, saving."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....common.data.processing import Batch
from ....common.losses import TokenLoss, linear_cross_entropy
from ....common.record import model_hash
from ....common.task import LossSum, Predicted
from ..losses import ctc
from ..metrics import Scored
from ..task import SpeechTask
from .config import Config
from .model import FRAMES_PER_POSITION, decode, encode, load_model
from .processing import WhisperProcessing, path_of
from .tokens import language_token

log = logging.getLogger(__name__)


class Task(SpeechTask):
    """Fine-tunes Whisper: the whole model, its decoder, or an adapter."""

    recipe: Config
    processing: WhisperProcessing
    model: Any

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        self.model, whisper = load_model(recipe, weights)
        self._whisper = [whisper]  # in a list, so that its parameters are not registered twice
        self.ctc_head: nn.Linear | None = None
        if recipe.task.ctc_weight:
            self.log_names = ("cross_entropy", "ctc")
            self.ctc_head = nn.Linear(whisper.config.d_model, whisper.config.vocab_size + 1, dtype=whisper.dtype)
        keeps_encodings = self.processing.cache is not None and recipe.model.freeze_encoder
        weights_hash = model_hash(recipe.model.path) if keeps_encodings else None
        self._encoder_hash = weights_hash and f"{weights_hash}-{recipe.train.precision}"
        if keeps_encodings and (weights_hash is None or recipe.model.audio_context == "dynamic"):
            log.warning(
                "data.cache keeps features only: encodings are kept for a local model at the full audio_context"
            )

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> WhisperProcessing:
        return WhisperProcessing(recipe, path_of(recipe, weights))

    @property
    def whisper(self) -> Any:
        """transformers' WhisperForConditionalGeneration inside the model."""
        return self._whisper[0]

    def compile_parts(self) -> None:
        for layer in [*self.whisper.model.encoder.layers, *self.whisper.model.decoder.layers]:
            layer.compile(dynamic=True)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Cross-entropy of the transcripts' tokens, and the weighted CTC loss of the encoder where asked."""
        encoded = self.encode(data)
        said = self._cross_entropy(encoded, data)
        if self.ctc_head is None:
            return said
        frames = (data["frames"] + 1) // FRAMES_PER_POSITION
        extra = ctc(self.ctc_head(encoded), frames, data["ctc_labels"], data["ctc_lengths"])
        logs = {"cross_entropy": float(said.sum.detach()), "ctc": float(extra.detach())}
        return LossSum(said.sum + self.recipe.task.ctc_weight * extra, said.count, logs)

    def encode(self, data: dict[str, Any]) -> Tensor:
        """The encoder's output [B, T / 2, D]; from the cache where the encoder is frozen."""
        if self._encoder_hash is None or not self._cacheable(data):
            return encode(self.whisper, data["features"], int(data["frames"].max()))
        return self._cached_encoding(data)

    def _cacheable(self, data: dict[str, Any]) -> bool:
        """At the full context and without masks, an utterance's encoding depends on nothing else in its batch."""
        full = data["features"].shape[2] == self.processing.mel.max_frames
        return full and not self.processing.augment.changes_features

    def _cached_encoding(self, data: dict[str, Any]) -> Tensor:
        cache = self.processing.cache
        assert cache is not None
        keys = [f"{key}-{self._encoder_hash}" for key in data["keys"]]
        found = [cache.get(key) for key in keys]
        missing = [row for row, encoding in enumerate(found) if encoding is None]
        if missing:
            with torch.no_grad():
                fresh = encode(self.whisper, data["features"][missing], int(data["frames"].max()))
            for row, encoding in zip(missing, fresh.half().cpu(), strict=True):
                cache.put(keys[row], encoding)
                found[row] = encoding
        encodings = torch.stack([encoding for encoding in found if encoding is not None])
        return encodings.to(self.device, self.whisper.dtype)

    def _cross_entropy(self, encoded: Tensor, data: dict[str, Any]) -> LossSum:
        hidden = decode(self.whisper, data["input_ids"], encoded)
        asked = data["labels"] != -100
        # Only places that carry loss are projected onto the vocabulary, which is most of the decoder's work.
        weight, kind = self.whisper.proj_out.weight, TokenLoss(smoothing=self.recipe.task.label_smoothing)
        return LossSum(linear_cross_entropy(hidden[asked], weight, data["labels"][asked], kind), int(asked.sum()))

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Transcripts of a batch, as `Scored` records, and its cross-entropy; the encoder runs once for both. The CTC
        loss is left out: its head is not saved, and a checkpoint alone has to give the same numbers."""
        data = batch.data
        encoded = self.encode(data)
        records = self.records(data, self.transcribe(encoded, data["prefixes"]))
        return Predicted(records, self._cross_entropy(encoded, data))

    def records(self, data: dict[str, Any], spoken: Sequence[Sequence[int]]) -> list[Scored]:
        """What was said of each recording of a batch, as new tokens, beside what should have been."""
        records = []
        for utterance, ids in zip(data["utterances"], spoken, strict=True):
            language = self.processing.targets.language(utterance)
            if self.recipe.task.task == "translate" or (language is None and not self.processing.targets.multilingual):
                language = "en"  # that of the text
            records.append(self.record(utterance, self.text(ids), language, self.processing.targets.times(ids)))
        return records

    def text(self, ids: Sequence[int]) -> str:
        """The text of new tokens, without control tokens and times."""
        text: str = self.processing.processor.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text.strip()

    def transcribe(self, encoded: Tensor, prefixes: Sequence[Sequence[int]]) -> list[list[int]]:
        """New tokens of encoded audio [B, T / 2, D], each after its own decoder prompt."""
        groups = defaultdict(list)
        for row, prefix in enumerate(prefixes):
            groups[len(prefix)].append(row)
        spoken: list[list[int]] = [[] for _ in prefixes]
        for rows in groups.values():
            prompts = torch.tensor([list(prefixes[row]) for row in rows], device=self.device)
            for row, ids in zip(rows, self._generate(encoded[rows], prompts), strict=True):
                spoken[row] = ids.tolist()
        return spoken

    def _generate(self, encoded: Tensor, prompts: Tensor) -> Tensor:
        """New token ids. The plain generation of transformers, as Whisper's own accepts no encoder output of another
        length; suppressed tokens and timestamp rules come from the generation config, as there."""
        from transformers import GenerationMixin
        from transformers.generation.logits_process import LogitsProcessorList, WhisperTimeStampLogitsProcessor
        from transformers.modeling_outputs import BaseModelOutput

        section, config = self.recipe.evaluate, deepcopy(self.whisper.generation_config)
        extra = LogitsProcessorList()
        if self.recipe.task.timestamps:
            config.no_timestamps_token_id = self.processing.targets.no_timestamps  # old checkpoints don't state it
            extra.append(WhisperTimeStampLogitsProcessor(config, begin_index=prompts.shape[1]))
        room = self.whisper.config.max_target_positions - prompts.shape[1]
        config.max_length = prompts.shape[1] + min(section.max_new_tokens, room)
        config.max_new_tokens, config.do_sample, config.num_beams = None, False, section.num_beams
        ids: Tensor = GenerationMixin.generate(
            self.whisper,
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            attention_mask=torch.ones(encoded.shape[:2], device=encoded.device),
            decoder_input_ids=prompts,
            logits_processor=extra,
            generation_config=config,
        )
        return ids[:, prompts.shape[1] :]

    @property
    def spelling(self) -> Mapping[str, str] | None:
        return getattr(self.processing.processor.tokenizer, "english_spelling_normalizer", None) or None

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        self.processing.processor.save_pretrained(directory)
        # transformers 5 puts these settings into processor_config.json only; other programs read them here.
        self.processing.processor.feature_extractor.save_pretrained(directory)
        self.generation_config().save_pretrained(directory)

    def exportable(self) -> Any:
        from .export import WhisperExport

        return WhisperExport(self)

    def generation_config(self) -> Any:
        """The generation config with what training used: language, task, timestamps."""
        config = deepcopy(self.whisper.generation_config)
        config._from_model_config = False
        section = self.recipe.task
        config.return_timestamps = section.timestamps
        targets = self.processing.targets
        config.is_multilingual, config.no_timestamps_token_id = targets.multilingual, targets.no_timestamps
        if targets.multilingual:
            config.lang_to_id = getattr(config, "lang_to_id", None) or targets.languages()
            config.task_to_id = getattr(config, "task_to_id", None) or targets.tasks()
            config.task = section.task
            config.language = language_token(section.language) if section.language else None
        return config
