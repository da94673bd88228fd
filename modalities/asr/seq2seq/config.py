"""The recipe of encoder-decoder models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ....common.recipe import ModelSection, Recipe, TaskSection
from ..config import SpeechData, SpeechEvaluate


class Seq2SeqTask(TaskSection):
    language: str | None = None
    """Language of rows that name none, as a code or name; it decides how words are counted, and fills `prompt`."""
    prompt: tuple[str, ...] = ()
    """Control tokens that stand before each text, after the model's start token, by name, such as
    `["<lang:{language}>"]` of Speech2Text; `{language}` is the row's. They carry no loss."""
    lowercase: bool = False
    """Train on text in lower case. Scores are against the text as it is."""
    unknown: Literal["refuse", "keep"] = "refuse"
    """Rows with text that the vocabulary lacks: leave them out under `data.on_bad`, or train its unknown token in their
    place, counted in the data report."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability mass spread over the vocabulary."""


class Seq2SeqModel(ModelSection):
    freeze_encoder: bool = False
    """Train the decoder only."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout of attention, activations and hidden states; null: as the model's own settings say."""
    batch_norm: Literal["keep", "train"] = "keep"
    """Running statistics of batch norms (Canary): as they are, or from each batch, padding included."""


class Config(Recipe):
    task: Seq2SeqTask
    """What is trained: the task kind, control tokens and text."""
    model: Seq2SeqModel
    """What it starts from, and which parts of it are trained."""
    data: SpeechData
    """What it is trained and evaluated on, and how audio is read, checked and varied."""
    evaluate: SpeechEvaluate = SpeechEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
