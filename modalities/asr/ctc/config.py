"""The recipe of CTC fine-tuning."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ....common.recipe import LocalOrHub, ModelSection, Recipe, Section, TaskSection
from ..config import SpeechData, SpeechEvaluate
from ..sections import Pairs


class SpellingSection(Section):
    """How a transcript becomes what the model is to write. Scores are against the transcript as it is."""

    case: Literal["keep", "lower", "upper"] = "keep"
    """Case of all letters."""
    punctuation: Literal["keep", "remove"] = "keep"
    """`remove` takes out punctuation and symbols, but for apostrophes and hyphens inside a word."""
    replace: Pairs = ()
    """Texts to be replaced by others, in this order, before anything else, such as `{"&": " and "}`."""


class CtcTask(TaskSection):
    language: str | None = None
    """Language of rows that name none, as a code or name; it decides how words are counted."""
    vocabulary: Literal["model", "extend", "new"] = "model"
    """`model` keeps the model's; `extend` adds the characters of the training text that it lacks; `new` is those
    characters alone. Tokens that were in the model's vocabulary keep their row of the output layer."""
    min_count: int = Field(1, ge=1)
    """`extend`, `new`: characters that the training text has fewer times than this stay out of the vocabulary."""
    unknown: Literal["refuse", "drop", "token"] = "refuse"
    """A transcript with characters that the vocabulary lacks: leave the example out, drop the characters, or train the
    unknown token in their place. They are counted by character in the data report."""
    spelling: SpellingSection = SpellingSection()
    """How a transcript becomes what the model is to write."""


class MaskSection(Section):
    """Masks on what the model makes of the audio, by the model itself (SpecAugment as in wav2vec 2.0)."""

    time_probability: float = Field(0.05, ge=0, lt=1)
    """Share of the frames that are masked, about, as a fraction."""
    time_length: int = Field(10, ge=1)
    """Frames of one mask."""
    feature_probability: float = Field(0.0, ge=0, lt=1)
    """Share of the features that are masked, about, as a fraction."""
    feature_length: int = Field(10, ge=1)
    """Features of one mask."""


class CtcModel(ModelSection):
    freeze_feature_encoder: bool = True
    """Keep the convolutions on raw audio as they are. Models that take mel features have none."""
    freeze_encoder: bool = False
    """Train the output layer only."""
    language: str | None = None
    """MMS: name of the adapter and of the vocabulary to start from, such as `ita`."""
    train_adapter: bool = False
    """MMS: train the adapter of the language and the output layer only. Without `language` it starts anew, for a
    language that the model does not know."""
    mask: MaskSection | None = None
    """Masks inside the model during training; absent: none, whatever the model's own settings say."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout of attention, activations and hidden states; null: as the model's own settings say."""
    batch_norm: Literal["keep", "train"] = "keep"
    """Running statistics of batch norms (Parakeet): as they are, or from each batch, padding included."""
    layerdrop: float = Field(0.0, ge=0, lt=1)
    """Probability that a layer is left out in training (LayerDrop, arXiv:1909.11556)."""


class StreamSection(Section):
    """Decoding as in live use: piece after piece of the recording, each with what is around it. The latency is
    `chunk_seconds` + `right_seconds`."""

    chunk_seconds: float = Field(1.0, gt=0)
    """Audio that is decoded at once, in seconds."""
    left_seconds: float = Field(4.0, ge=0)
    """Audio before it that the model hears again, in seconds."""
    right_seconds: float = Field(0.5, ge=0)
    """Audio after it that the model waits for, in seconds."""


class CtcEvaluate(SpeechEvaluate):
    lm: LocalOrHub | None = None
    """Language model of words for the beam search (`num_beams` above 1): an ARPA file, plain or with gzip."""
    lm_weight: float = Field(0.5, ge=0)
    """Weight of the language model's log-probabilities (alpha)."""
    word_bonus: float = 1.5
    """Added to the score for each word (beta), in nats."""
    hotwords: tuple[str, ...] = ()
    """Words and names that the beam search favours, as the model would write them."""
    hotword_weight: float = Field(10.0, ge=0)
    """Added to the score for each hot word, in nats."""
    stream: StreamSection | None = None
    """Decode in pieces, as in live use; absent: each example as a whole."""

    @model_validator(mode="after")
    def _searched(self) -> Self:
        if self.num_beams == 1 and (self.lm or self.hotwords):
            raise ValueError("lm and hotwords belong to the beam search; set num_beams too, such as 50")
        return self


class Config(Recipe):
    task: CtcTask
    """What is trained: the task kind, the vocabulary and the spelling."""
    model: CtcModel
    """What it starts from, and which parts of it are trained."""
    data: SpeechData
    """What it is trained and evaluated on, and how audio is read, checked and varied."""
    evaluate: CtcEvaluate = CtcEvaluate()
    """Evaluation during training and by `luthier evaluate`."""

    @model_validator(mode="after")
    def _masked_once(self) -> Self:
        augment = self.data.augment
        if self.model.mask and (augment.time_masks or augment.frequency_masks):
            raise ValueError("model.mask and the masks of data.augment both hide parts of the audio; choose one")
        return self

    @model_validator(mode="after")
    def _one_adapter(self) -> Self:
        if self.model.train_adapter and self.model.lora:
            raise ValueError("model.train_adapter (MMS) and model.lora are two adapters; choose one")
        if self.model.freeze_encoder and (self.model.train_adapter or self.model.lora):
            raise ValueError("model.freeze_encoder leaves no adapter to be trained; take one of them out")
        return self
