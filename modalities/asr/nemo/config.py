"""The recipe of NeMo's speech recognisers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ....common.recipe import LocalOrHub, LoraSection, ModelSection, Recipe, TaskSection
from ..config import SpeechData, SpeechEvaluate
from ..sections import Pairs


class NemoTask(TaskSection):
    language: str | None = None
    """Language of rows that name none, as a code (`it`): for scoring, and for tokenizers with several languages."""
    lowercase: bool = False
    """Write transcripts in lower case before they become tokens; scores are taken against the text as it is."""
    unknown: Literal["refuse", "drop"] = "refuse"
    """A training text with characters that the vocabulary lacks: leave the row out, or drop these characters. Both are
    counted in the report, character by character."""
    prompt: Pairs = ()
    """Of Canary models: values of the prompt's slots, such as `{pnc: no}` or `{target_lang: de, task: translate}`. A
    field of the row with the slot's name goes before; languages are else those of the row or the recipe."""


class NemoLora(LoraSection):
    target_modules: str | tuple[str, ...] = ("linear_q", "linear_v")
    """Names of the layers that get an adapter, a regular expression, or `all-linear`."""


class NemoModel(ModelSection):
    path: LocalOrHub
    """A `.nemo` file or a folder that holds one, a hub name, or a YAML configuration to start from random weights."""
    lora: NemoLora | None = None
    """Train an adapter and freeze the rest; absent: train the model itself."""
    config: Pairs = ()
    """Pairs of NeMo's own configuration by its dotted keys, such as `{encoder.dropout: 0.0}`."""
    vocabulary: Literal["model", "data"] | LocalOrHub = "model"
    """`model`: the model's own; `data`: the characters of the training texts; or the path of a SentencePiece model (or
    of the folder with its `tokenizer.model`). Rows of tokens that stay are kept."""
    freeze_encoder: bool = False
    """Train the decoder only; the encoder (of Canary models all that comes before the decoder) stays in evaluation
    mode, its batch statistics too."""
    spec_augment: bool = False
    """Mask features by the model's own `spec_augment` section; off, as `data.augment` has the same masks."""
    joint_batch: int | None = Field(None, ge=1)
    """Of transducers: examples whose joint network is computed together, and again for the gradient, so that only their
    [T, U, V] lies in memory; null: `joint.fused_batch_size` of a model with `joint.fuse_loss_wer`, else the batch."""


class NemoEvaluate(SpeechEvaluate):
    decoder: Literal["model", "ctc"] = "model"
    """Of hybrids: transcribe by the transducer, or by the CTC head."""
    decoding: Pairs = ()
    """Pairs of NeMo's decoding section by its dotted keys: beams, n-gram models, phrases to boost."""
    att_context_size: tuple[int, int] | None = None
    """Of cache-aware encoders: left and right context in frames of the encoder; null: the model's first."""
    streaming: bool = False
    """Of cache-aware encoders: run chunk by chunk, each seeing the cache of those before, as a live service would."""


class Config(Recipe):
    task: NemoTask
    """What is trained: the task kind and what becomes of the texts."""
    model: NemoModel
    """What it starts from, which parts are trained, and in which vocabulary it writes."""
    data: SpeechData
    """What it is trained and evaluated on, and how audio is read, checked and varied."""
    evaluate: NemoEvaluate = NemoEvaluate()
    """Evaluation during training and by `luthier evaluate`."""

    @model_validator(mode="after")
    def _adapted(self) -> Self:
        if self.model.lora is not None and self.model.vocabulary != "model":
            raise ValueError("model.lora freezes the rows that model.vocabulary makes; train the model itself first")
        return self
