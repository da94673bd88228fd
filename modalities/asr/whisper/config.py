"""The recipe of Whisper fine-tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ....common.recipe import ModelSection, Recipe, TaskSection
from ..config import SpeechData, SpeechEvaluate


class WhisperTask(TaskSection):
    language: str | None = None
    """Language of rows that name none, as a code or name (`it`, `italian`). Needed by multilingual models, unless every
    row has its own."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """Write the language that is spoken, or English."""
    timestamps: bool = False
    """Train and decode with timestamp tokens: of a row's `segments`, or else around its whole text."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability mass spread over the vocabulary."""
    ctc_weight: float = Field(0.0, ge=0)
    """Weight of a CTC loss on the encoder, a help for models that are trained from nothing; its head is not part of the
    saved model."""


class WhisperModel(ModelSection):
    freeze_encoder: bool = False
    """Train the decoder only; with `data.cache` and without augmentation the encoder's output is computed once."""
    audio_context: Literal["full", "dynamic"] = "full"
    """`full` pads every example to the model's 30 s, as Whisper was made. `dynamic` runs the encoder only as long as
    the batch needs: many times less work on short clips. It changes what the model sees, so that some batches
    (`long_context_share`) still run with longer contexts and the model keeps serving 30 s inference."""
    context_margin: float = Field(0.5, ge=0)
    """`dynamic`: silence after the longest example of a batch, in seconds."""
    long_context_share: float = Field(0.05, ge=0, le=1)
    """`dynamic`: share of batches run with a random context between what they need and the full one (its logarithm
    drawn evenly)."""


class WhisperEvaluate(SpeechEvaluate):
    audio_context: Literal["full", "dynamic"] = "full"
    """Context of the evaluation: `full` is what Whisper's users run; `dynamic` is faster."""


class Config(Recipe):
    task: WhisperTask
    """What is trained: the task kind, language and tokens."""
    model: WhisperModel
    """What it starts from, which parts are trained, and how much audio the encoder sees."""
    data: SpeechData
    """What it is trained and evaluated on, and how audio is read, checked and varied."""
    evaluate: WhisperEvaluate = WhisperEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
