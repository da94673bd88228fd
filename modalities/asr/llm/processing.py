"""The data path of speech-LLMs: from manifests to chats with a recording. Runs in the data workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ....common.data.processing import Shown
from ....common.errors import BadExample, ModelError
from ..audio import Wave
from ..features import draw
from ..processing import IGNORED, GeneratingProcessing
from ..utterance import Utterance
from .config import Config
from .model import load_config, load_processor
from .turn import Turn, Turns


@dataclass(frozen=True)
class Encoded:
    """One utterance as model input.

    Args:
        prompt: token ids [P] up to where generation begins.
        answer: token ids [A] of the transcript, the end token last; none where it carries no loss.
        heard: the audio, as the model's processor gives it, each [1, ...].
        utterance: what was encoded.
    """

    prompt: Tensor
    answer: Tensor
    heard: dict[str, Tensor]
    utterance: Utterance


class SpeechLlmProcessing(GeneratingProcessing):
    """What a speech-LLM does with utterances.

    Args:
        recipe: the resolved recipe.
        weights: directory of a saved model or adapter, whose processor is used.
    """

    def __init__(self, recipe: Config, weights: Path | None = None):
        self.recipe = recipe
        path = recipe.model.path if weights is None else str(weights)
        load_config(recipe.model.path if recipe.model.lora else path)
        self.processor = load_processor(path)
        self.tokenizer, self.turns = self.processor.tokenizer, Turns(self.processor)
        extractor = self.processor.feature_extractor
        super().__init__(recipe.data, int(extractor.sampling_rate), int(extractor.n_samples))
        if self.cache is not None or self.augment.changes_features:
            raise ModelError(
                "the model's processor makes features and their tokens at once, so that none are kept or masked",
                where="data.cache" if self.cache is not None else "data.augment",
            )

    @property
    def settings(self) -> str:
        return "samples"

    def features(self, wave: Wave) -> Tensor:
        """The samples, as one feature [1, N]."""
        return torch.from_numpy(np.ascontiguousarray(wave, dtype=np.float32))[None]

    # ------------------------------------------------------------------ text

    def language(self, utterance: Utterance) -> str | None:
        return utterance.language or self.recipe.task.language

    def turn(self, utterance: Utterance) -> Turn:
        """What is asked and answered about a recording."""
        section, language = self.recipe.task, self.language(utterance)
        if "{language}" in section.instruction and language is None and utterance.prompt is None:
            raise BadExample("unknown_language", "the instruction needs the row's language", where=utterance.where)
        instruction = utterance.prompt or section.instruction.replace("{language}", language or "")
        return self.turns(instruction, section.system, " ".join(utterance.text.split()), utterance.where)

    def check(self, utterance: Utterance, training: bool) -> None:
        if training and not utterance.text.strip():
            raise BadExample("no_text", "there is nothing to be learned", where=utterance.where)
        self.turn(utterance)

    # ------------------------------------------------------------------ encoding

    def encode(self, example: Utterance, generator: np.random.Generator | None) -> Encoded:
        wave = self.hear(example, generator).features[0].numpy()
        turn = self.turn(example)
        given = self.processor(
            text=[turn.prompt], audio=[wave], sampling_rate=self.rate, return_tensors="pt", add_special_tokens=False
        )
        # What is said in a piece of a longer recording isn't known.
        answer = turn.answer if example.whole is None and example.text.strip() else ()
        heard = {name: value for name, value in given.items() if name not in self.tokenizer.model_input_names}
        return Encoded(given["input_ids"][0], torch.tensor(answer, dtype=torch.long), heard, example)

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """A batch.

        Returns:
            input_ids, mask: prompts and answers [B, L], padded at the right, and which are real.
            labels: the token itself where it carries loss [B, L], -100 elsewhere.
            prompts, prompt_mask: prompts alone [B, P], padded at the left, as generation takes them.
            heard: the audio, by the names of the model's inputs.
            utterances: list of the utterances.
        """
        fill = self.tokenizer.pad_token_id or 0
        whole = [torch.cat([item.prompt, item.answer]) for item in encoded]
        asked = [torch.cat([torch.full_like(item.prompt, IGNORED), item.answer]) for item in encoded]
        prompts = [item.prompt.flip(0) for item in encoded]
        return {
            "input_ids": pad_sequence(whole, batch_first=True, padding_value=fill),
            "mask": pad_sequence([torch.ones_like(ids) for ids in whole], batch_first=True),
            "labels": pad_sequence(asked, batch_first=True, padding_value=IGNORED),
            "prompts": pad_sequence(prompts, batch_first=True, padding_value=fill).flip(1),
            "prompt_mask": pad_sequence([torch.ones_like(ids) for ids in prompts], batch_first=True).flip(1),
            "heard": {name: torch.cat([item.heard[name] for item in encoded]) for name in encoded[0].heard},
            "utterances": [item.utterance for item in encoded],
        }

    def show(self, data: dict[str, Any], row: int) -> Shown:
        utterance, length = data["utterances"][row], int(data["mask"][row].sum())
        ids, labels = data["input_ids"][row, :length].tolist(), data["labels"][row, :length].tolist()
        audio = self.processor.audio_token_id
        facts = {
            "audio": f"{utterance.duration:.2f} s, {ids.count(audio)} positions",
            "language": str(self.language(utterance)),
            "text": utterance.text,
        }
        tokens = [
            (self.tokenizer.decode([token]), label != IGNORED)
            for at, (token, label) in enumerate(zip(ids, labels, strict=True))
            if token != audio or ids[at - 1] != audio  # one for all
        ]
        return Shown(utterance.where, facts, tokens, draw(data["heard"]["input_features"][row]))
