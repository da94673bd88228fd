"""The parts of a recipe that say how pictures and captions are read, varied and kept, and what the loss is."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ...common.recipe import LocalOrHub, LoraSection, Section

Fraction = Annotated[float, Field(ge=0, le=1)]
Level = Annotated[int, Field(ge=0, le=255)]


class ImageSection(Section):
    """How a picture is read and brought to the size that it is trained at."""

    resolution: int = Field(512, ge=8)
    """Side of a square picture, in pixels; other aspect ratios get about the same area."""
    buckets: bool = True
    """Train each picture at the size nearest to its own aspect ratio; false: all are cropped to squares."""
    step: int = Field(64, ge=1)
    """Sides of all sizes are multiples of this, in pixels."""
    max_ratio: float = Field(2.0, ge=1)
    """Most elongated size: the longer side over the shorter one. A picture beyond it is cropped to it."""
    upscale: bool = True
    """Enlarge pictures that are smaller than their size; false: they are trained at a smaller size of their own."""
    min_side: int = Field(32, ge=1)
    """Shorter side of the smallest picture that is used, in pixels."""
    crop: Literal["center", "random"] = "center"
    """Which part is taken of what overlaps; `random` is drawn anew each time."""
    flip: Fraction = 0.0
    """Share of the pictures that are mirrored left to right, as a fraction; not for what has a left and a right."""
    background: tuple[Level, Level, Level] = (255, 255, 255)
    """What transparent pictures are laid on: red, green, blue."""


class CaptionSection(Section):
    """What becomes of captions before the text encoder reads them."""

    default: str | None = None
    """Caption of pictures that have none; without it such a picture is left out (`no_caption`)."""
    prefix: str = ""
    """Written before every caption, such as a trigger word (`sks style, `)."""
    dropout: Fraction = 0.0
    """Share of the captions that are replaced by an empty one in training, for classifier-free guidance."""
    shuffle: bool = False
    """Bring the parts of a caption between commas into a new order each time."""
    keep: int = Field(0, ge=0)
    """With `shuffle`: number of first parts that stay where they are."""
    chunks: int = Field(1, ge=1, le=8)
    """Pieces of 75 tokens that a caption may have (Stable Diffusion, SDXL); each piece is read for itself and the
    results are joined, as most user interfaces do. What is beyond is cut, and counted."""


class CacheSection(Section):
    """Latents and text embeddings kept on disk between epochs and runs, as 16-bit floats."""

    folder: str | None = None
    """Folder of the cache, made if absent; null: everything is encoded each time."""
    max_gb: float = Field(20.0, gt=0)
    """Most space of the cache, in GB (10^9 bytes); the files unused for longest make room."""


class PriorSection(Section):
    """Class images, that keep the model's idea of the class while it learns the subject (DreamBooth,
    arXiv:2208.12242). Each example is trained together with one of them."""

    path: str
    """Folder of class images; what is missing to `number` is made by the base model and kept there."""
    caption: str = Field(min_length=1)
    """What they show, such as `a photo of a dog`."""
    number: int = Field(100, ge=1)
    """How many there should be."""
    weight: float = Field(1.0, gt=0)
    """Weight of their loss."""
    meaning: Literal["sum", "mean"] = "sum"
    """`sum`: mean loss of the examples + weight x mean loss of the class images, as in the paper and diffusers.
    `mean`: weighted mean over both, (sum + weight x sum) / number of both, as in kohya's scripts: half of it."""
    steps: int = Field(30, ge=1)
    """Denoising steps of a class image that is made."""
    guidance: float = Field(7.5, ge=0)
    """Guidance scale of a class image that is made."""


class WeightSection(Section):
    """How much each noise level counts."""

    kind: Literal["none", "min_snr", "debiased", "p2", "sigma_sqrt", "cosmap"] = "none"
    """`min_snr` (arXiv:2303.09556), `debiased` (arXiv:2310.08442) and `p2` (arXiv:2204.00227) weigh by the ratio of
    signal to noise; `sigma_sqrt` and `cosmap` (arXiv:2403.03206) are for flow matching."""
    gamma: float = Field(5.0, gt=0)
    """Of `min_snr`: the ratio above which the weight falls; of `p2`: its exponent (1 in the paper)."""


class NoiseSection(Section):
    """What is added to the noise in training; all is off by default."""

    offset: float = Field(0.0, ge=0)
    """Size of noise that is the same over the whole picture (offset noise); 0.05 to 0.1 is usual."""
    multires: int = Field(0, ge=0)
    """Number of coarser noises that are added (multi-resolution noise); 6 is usual."""
    multires_discount: float = Field(0.3, gt=0, lt=1)
    """Size of each coarser noise relative to the one before."""
    perturbation: float = Field(0.0, ge=0)
    """Size of noise on the input that is not in the target (input perturbation, arXiv:2301.11706); 0.1 is usual."""


class TimestepSection(Section):
    """Which noise levels are trained."""

    sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """How a level is drawn: `logit_normal` and `mode` (arXiv:2403.03206) prefer the middle."""
    mean: float = 0.0
    """Of `logit_normal`: mean of the logit; above 0 means more noise."""
    std: float = Field(1.0, gt=0)
    """Of `logit_normal`: standard deviation of the logit."""
    mode_scale: float = Field(1.29, ge=-1, le=1.75)
    """Of `mode`: how much the middle is preferred."""
    shift: Literal["scheduler"] | Annotated[float, Field(gt=0)] = "scheduler"
    """Flow matching: factor s in s x / (1 + (s - 1) x), which moves levels towards more noise. `scheduler`: that of
    the model's scheduler, by resolution where it says so; 1: none."""
    range: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Lowest and highest level, as shares of all; 1 is pure noise."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range is (lowest, highest), and {self.range[0]:g} is not below {self.range[1]:g}")
        return self


class ImageLora(LoraSection):
    """An adapter of PEFT's LoRA family."""

    type: Literal["lora", "lokr", "loha"] = "lora"
    """Form of the update: low rank, Kronecker product (LoKr) or Hadamard product (LoHa)."""
    target_modules: str | tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """Names of the layers that get an adapter, or a regular expression."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """Start values of the adapter, by PEFT's names; all start as the base model exactly."""

    @model_validator(mode="after")
    def _as_the_type_has_it(self) -> Self:
        if self.modules_to_save:
            raise ValueError("modules_to_save is not known here: image pipelines load adapters only")
        if self.type != "lora" and (self.dora or self.rslora or self.init != "default"):
            raise ValueError("dora, rslora and init are of the type lora")
        return self


class TextLora(ImageLora):
    target_modules: str | tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "out_proj")
    """Names of the layers that get an adapter, or a regular expression."""


class TokenSection(Section):
    """A new word, whose embedding is learned (textual inversion, arXiv:2208.01618)."""

    token: str = Field(min_length=1)
    """The word, as captions write it; not yet in the vocabulary, such as `<sks>`."""
    start: str = Field(min_length=1)
    """A known word whose embedding it starts from."""
    vectors: int = Field(1, ge=1, le=32)
    """Number of embeddings that the word stands for."""


def _tokens(value: tuple[TokenSection, ...]) -> tuple[TokenSection, ...]:
    if len({item.token for item in value}) < len(value):
        raise ValueError("two new tokens are the same")
    return value


NewTokens = Annotated[tuple[TokenSection, ...], AfterValidator(_tokens)]


class SamplingSection(Section):
    """Pictures made at each evaluation, from fixed prompts and seeds, beside the base model's."""

    prompts: tuple[str, ...] = Field(min_length=1)
    """What is asked for; one picture each."""
    negative: str = ""
    """What is not wanted."""
    steps: int = Field(30, ge=1)
    """Denoising steps."""
    guidance: float = Field(7.5, ge=0)
    """Guidance scale; up to 1: none (Stable Diffusion), or the distilled guidance (Flux)."""
    width: int | None = Field(None, ge=8)
    """Width, in pixels; default: `data.image.resolution`."""
    height: int | None = Field(None, ge=8)
    """Height, in pixels; default: `data.image.resolution`."""
    seed: int = Field(0, ge=0)
    """Seed of the first picture; each further one has the next."""
    clip: LocalOrHub | None = None
    """CLIP model that says how well pictures fit their prompts, the metric `clip_score`, and how good they look,
    `clip_iqa`."""
