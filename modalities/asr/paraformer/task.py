"""The Paraformer task: FunASR's loss, transcription, saving."""

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
from ..utterance import Utterance
from . import hotwords, sensevoice
from .config import Config
from .directory import WEIGHTS, read, write
from .model import layers, load_model
from .processing import ParaformerProcessing


class Task(SpeechTask):
    """Trains Paraformer or SenseVoice: the whole model, parts of it, or an adapter."""

    recipe: Config
    processing: ParaformerProcessing
    model: Any

    def __init__(self, recipe: Config, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        self.model, paraformer = load_model(recipe, weights, self.processing)
        self._paraformer = [paraformer]  # in a list, so that its parameters are not registered twice
        self.senses = self.processing.tags is not None
        parts = ("rich",) if self.senses else ("attention", "predictor")
        self.log_names = (*parts, *(("ctc",) if paraformer.ctc is not None else ()))

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> ParaformerProcessing:
        directory = read(recipe.model.path if weights is None else str(weights))
        if weights is not None and recipe.model.lora is not None:  # an adapter is saved without the model's weights
            directory = directory.beside(read(recipe.model.path))
        return ParaformerProcessing(recipe, directory, extend=weights is None)

    @property
    def paraformer(self) -> Any:
        """FunASR's model inside the model."""
        return self._paraformer[0]

    def compile_parts(self) -> None:
        for layer in layers(self.paraformer):
            layer.compile(dynamic=True)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """FunASR's loss times what it divided by: rows, or tokens and end marks with `length_normalized_loss`.

        All of its parts are divided by the same, but for a CTC loss beside `length_normalized_loss`, which stays the
        mean over the rows of a batch; the batch then weighs by its tokens, as FunASR has it. SenseVoice's two parts are
        means over rows whatever it says.
        """
        paraformer, rows = self.paraformer, len(data["speech"])
        inputs = {name: data[name] for name in _INPUTS}
        inputs["speech_lengths"] = inputs["speech_lengths"].clone()  # some models change it in place
        words = {name: data[name] for name in _HOTWORDS if name in data}
        if (
            words and rows == 1
        ):  # FunASR's contextual model drops this dimension of a batch: the mean of two is the same
            inputs = {name: torch.cat([value, value]) for name, value in inputs.items()}
        loss, stats, _ = paraformer(**inputs, **words)
        by_tokens = paraformer.length_normalized_loss and not self.senses
        count = data["tokens"] + self.processing.closing * rows if by_tokens else rows
        found = ((name, stats.get(f"loss_{key}")) for name, key in _PARTS.items())
        logs = {name: float(value) * count for name, value in found if value is not None}
        return LossSum(loss.squeeze() * count, count, logs)

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Transcripts of a batch, and its loss, without the random glimpses at the target that the decoder gets in
        training."""
        return Predicted(self.heard(batch), self._known_loss(batch.data))

    @torch.no_grad()
    def heard(self, batch: Batch) -> list[Any]:
        """Transcripts of a batch, as `Scored` records. Each row is transcribed alone, as FunASR's own programs do:
        padding is not masked everywhere, and a transcript must not depend on what else is in its batch."""
        data, records = batch.data, []
        for row, utterance in enumerate(data["utterances"]):
            hypothesis = self.transcribe(data["speech"][row, : int(data["speech_lengths"][row])], utterance)
            language = utterance.language or self.recipe.task.language
            records.append(self.record(utterance, hypothesis, language))
        return records

    def _known_loss(self, data: dict[str, Any]) -> LossSum | None:
        """The loss of the rows whose text is known and can be written: not that of a piece of a long recording."""
        rows = data["text_lengths"].nonzero().squeeze(1)
        if not len(rows):
            return None
        with self._unsampled():
            return self.loss({**data, **{name: data[name][rows] for name in _INPUTS}})

    def transcribe(self, features: Tensor, utterance: Utterance) -> str:
        """Text of an utterance's features [T, F], by FunASR's own decoding; empty if no token is found."""
        section, tokens = self.recipe.evaluate, self.processing.tokens
        search: dict[str, Any] = {
            "beam_size": section.num_beams,
            "decoding_ctc_weight": section.decoding_ctc_weight,
            "token_list": tokens.listed,
        }
        if self.senses:
            search = {"text_norm": sensevoice.style(utterance)}
        paraformer = self.paraformer
        given = {"key": ["utterance"], "tokenizer": tokens.tokenizer, "device": self.device, **search}
        lengths = torch.tensor([len(features)] if self.senses else [[len(features)]])
        try:
            if self.processing.contextual:
                frontend = hotwords.Given(features, self.processing.frontend.seconds)
                with hotwords.listening(paraformer, self.processing.hotwords):
                    found = paraformer.inference([torch.zeros(1)], frontend=frontend, **given)
            else:
                found = paraformer.inference(features[None], lengths, data_type="fbank", **given)
        finally:
            paraformer.beam_search = None  # it holds the CTC head, which would count twice
        text = str(found[0][0]["text"]) if found else ""
        return sensevoice.plain(text) if self.senses else text

    @contextmanager
    def _unsampled(self) -> Iterator[None]:
        paraformer = self.paraformer
        if self.senses:
            with sensevoice.untold(paraformer):
                yield
            return
        before = getattr(paraformer, "sampling_ratio", 0.0)
        paraformer.sampling_ratio = 0.0
        try:
            yield
        finally:
            paraformer.sampling_ratio = before

    # ------------------------------------------------------------------ saving

    def exportable(self) -> Any:
        from .export import ParaformerExport

        return ParaformerExport(self)

    def save_pretrained(self, directory: Path) -> None:
        """FunASR's own form; with an adapter, that of PEFT beside the configuration and the token list."""
        tokens = self.processing.tokens
        write(self.processing.directory, directory, tokens.listed, tokens.seg_dict)
        if self.model is not self.paraformer:
            self.model.save_pretrained(directory)
        else:
            state = {name: value.detach().cpu() for name, value in self.paraformer.state_dict().items()}
            torch.save(state, directory / WEIGHTS)


_INPUTS = ("speech", "speech_lengths", "text", "text_lengths")
_HOTWORDS = ("hotword_pad", "hotword_lengths")
_PARTS = {"attention": "att", "predictor": "pre", "ctc": "ctc", "rich": "rich"}
"""Names in the logs, and in FunASR's statistics."""
