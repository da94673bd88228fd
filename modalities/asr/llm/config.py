"""The recipe of speech-LLMs."""

from __future__ import annotations

from pydantic import Field

from ....common.recipe import ModelSection, Recipe, TaskSection
from ..config import SpeechData, SpeechEvaluate


class SpeechLlmTask(TaskSection):
    language: str | None = None
    """Language of rows that name none, as a code or name; it decides how words are counted, and fills `instruction`."""
    instruction: str = "Transcribe the speech."
    """What the user asks beside the recording; `{language}` is the row's. A row's own `prompt` comes first."""
    system: str | None = None
    """System message before it; null: what the model's chat template writes."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability mass spread over the vocabulary."""


class SpeechLlmModel(ModelSection):
    freeze_encoder: bool = False
    """Keep the audio encoder as it is. What joins it to the language model is trained."""
    freeze_language_model: bool = False
    """Keep the language model as it is."""


class Config(Recipe):
    task: SpeechLlmTask
    """What is trained: the task kind and what is asked."""
    model: SpeechLlmModel
    """What it starts from, and which parts of it are trained."""
    data: SpeechData
    """What it is trained and evaluated on, and how audio is read, checked and varied."""
    evaluate: SpeechEvaluate = SpeechEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
