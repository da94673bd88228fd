"""The recipe of text-to-image training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ....common.recipe import (
    BatchSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    Quantization,
    Recipe,
    TaskSection,
)
from ..sections import (
    CacheSection,
    CaptionSection,
    ImageLora,
    ImageSection,
    NewTokens,
    NoiseSection,
    PriorSection,
    SamplingSection,
    TextLora,
    TimestepSection,
    WeightSection,
)


class ImageTask(TaskSection):
    weight: WeightSection = WeightSection()
    """How much each noise level counts in the loss."""
    noise: NoiseSection = NoiseSection()
    """What is added to the noise."""
    timesteps: TimestepSection = TimestepSection()
    """Which noise levels are trained."""
    latents: Literal["sample", "mean"] = "sample"
    """Draw the latents from what the VAE gives, or take its mean."""
    masked: bool = False
    """Count the loss only where a picture's mask is white (`mask` in a row, or `NAME.mask.png` beside the picture).
    Each picture counts as much as any other; one without a mask counts everywhere."""
    guidance: float = Field(1.0, ge=0)
    """Guidance that a guidance-distilled model (Flux dev) is told in training."""


class ImageModel(ModelSection):
    lora: ImageLora | None = None
    """Train an adapter on the denoiser; absent: train the denoiser itself."""
    text_encoder_lora: TextLora | None = None
    """Train an adapter on the CLIP text encoders too; text embeddings can't be cached then."""
    new_tokens: NewTokens = ()
    """New words whose embeddings are learned, alone (with `freeze_denoiser`) or beside an adapter (pivotal tuning)."""
    freeze_denoiser: bool = False
    """Leave the denoiser as it is, so that only new words or text encoders are trained."""
    quantization: Quantization = "none"
    """Keep the linear layers of the frozen denoiser in 4 bits (QLoRA, arXiv:2305.14314); needs `lora`, and is slow on a
    CPU."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of an average of the trained weights over the steps (EMA), such as 0.999; the average is what is evaluated
    and saved. It warms up: at step n the decay is at most (1 + n) / (10 + n)."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if self.freeze_denoiser and self.lora is not None:
            raise ValueError("freeze_denoiser and lora exclude each other")
        if self.freeze_denoiser and self.text_encoder_lora is None and not self.new_tokens:
            raise ValueError("nothing to train: the denoiser is frozen, and there is no other part")
        if self.lora is None and not self.freeze_denoiser and self.trains_text:
            raise ValueError("beside text encoders or new words give lora, or freeze_denoiser: true")
        return self

    @property
    def trains_text(self) -> bool:
        """Whether text embeddings change during the training."""
        return self.text_encoder_lora is not None or bool(self.new_tokens)


class PixelBatch(BatchSection):
    pixels: int | None = Field(None, ge=1)
    """Most pixels in a batch; pictures of one size only are in it, so that nothing is padded."""

    def budget(self) -> float | None:
        return self.pixels


class ImageData(DataSection):
    batch: PixelBatch = PixelBatch()
    """Bounds of one batch on one device."""
    image: ImageSection = ImageSection()
    """How pictures are read and sized."""
    captions: CaptionSection = CaptionSection()
    """What becomes of captions."""
    cache: CacheSection = CacheSection()
    """Latents and text embeddings kept on disk."""
    prior: PriorSection | None = None
    """Class images beside the examples (DreamBooth); absent: none."""

    @model_validator(mode="after")
    def _cacheable(self) -> Self:
        if self.cache.folder and self.image.crop == "random":
            raise ValueError("data.cache keeps latents of one part of a picture; set data.image.crop to center")
        return self


class ImageEvaluate(EvaluateSection):
    slices: tuple[str, ...] = ("source",)
    """Fields by which metrics are also given: `source`, or any field of the rows. The noise level always is one."""
    timesteps: int = Field(4, ge=1)
    """Noise levels at which each picture of the evaluation is denoised, evenly spread; noise and levels are fixed."""
    sampling: SamplingSection | None = None
    """Pictures made at each evaluation; absent: none."""


class Config(Recipe):
    task: ImageTask
    """What is trained: the task kind, noise and loss."""
    model: ImageModel
    """What it starts from, and which parts are trained."""
    data: ImageData
    """What it is trained and evaluated on, and how pictures and captions are read."""
    evaluate: ImageEvaluate = ImageEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
