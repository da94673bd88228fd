"""The recipe of Paraformer training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ....common.recipe import LoraSection, ModelSection, Recipe, TaskSection
from ..config import SpeechData, SpeechEvaluate


class ParaformerTask(TaskSection):
    language: str | None = None
    """Language of rows that name none, as a code or name (`zh`); it decides how text is scored."""
    text: Literal["raw", "lower", "normalized"] = "raw"
    """What of a transcript is trained: the text as it is, in lower case (for token lists without capitals), or as it is
    scored, without case, punctuation and symbols. Scores are always against the text as it is."""
    unknown: Literal["refuse", "keep"] = "refuse"
    """Rows with characters or words that the token list lacks: leave them out under `data.on_bad`, or train them as
    `<unk>`, counted in the data report. `model.new_tokens` adds tokens."""
    predictor_weight: float | None = Field(None, ge=0)
    """Weight of the loss on the number of tokens; default: the model's own. FunASR's default is 0, with which a model
    never learns how many tokens it has to write, so that 0 has to be given here to be accepted."""


class ParaformerLora(LoraSection):
    target_modules: str | tuple[str, ...] = r".*attn\.linear_.*"
    """Names of the layers that get an adapter, a regular expression, or `all-linear`; default: all of attention."""


class ParaformerModel(ModelSection):
    lora: ParaformerLora | None = None
    """Train an adapter and freeze the rest; absent: train the model itself."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that are not trained, such as `encoder`, `decoder`, `predictor` or `ctc`."""
    new_tokens: tuple[str, ...] | Literal["train"] = ()
    """Tokens added to the model's list; `train`: what the training texts need and the list lacks. Old tokens keep their
    ids and rows, a new one starts from the mean of the old rows."""
    dither: float = Field(0.0, ge=0)
    """Noise added to training audio before its features, as standard deviation in steps of 16-bit audio (Kaldi's
    `dither`); evaluation and the saved model have none."""


class ParaformerEvaluate(SpeechEvaluate):
    decoding_ctc_weight: float = Field(0.0, ge=0, le=1)
    """Weight of the CTC head in a beam search of `num_beams`; needs a model with such a head."""
    hotwords: tuple[str, ...] = ()
    """Words that a contextual Paraformer is to listen for; its training draws such words from the texts."""

    @model_validator(mode="after")
    def _searchable(self) -> Self:
        if (self.num_beams > 1) != (self.decoding_ctc_weight > 0):
            raise ValueError("a beam search joins decoder and CTC: give num_beams and decoding_ctc_weight, or neither")
        return self


class Config(Recipe):
    task: ParaformerTask
    """What is trained: the task kind, language and text."""
    model: ParaformerModel
    """What it starts from (a FunASR directory; one without `model.pt` starts from random weights), and which parts are
    trained."""
    data: SpeechData
    """What it is trained and evaluated on, and how audio is read, checked and varied."""
    evaluate: ParaformerEvaluate = ParaformerEvaluate()
    """Evaluation during training and by `luthier evaluate`."""

    @model_validator(mode="after")
    def _computable(self) -> Self:
        if self.train.precision == "bf16-true":
            raise ValueError("FunASR's models mix float32 into their sums and can't be all bfloat16; take bf16-mixed")
        return self

    @model_validator(mode="after")
    def _undithered(self) -> Self:
        if self.data.cache.folder and self.model.dither:
            raise ValueError("data.cache keeps features of the audio as it is, and model.dither varies the audio")
        return self
