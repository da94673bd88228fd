"""The recipe of preference optimisation on pairs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ....common.recipe import LocalOrHub, Recipe, Section, TaskSection
from ..config import ChatData, ChatEvaluate, LanguageModel

Name = Literal[
    "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "orpo", "simpo", "cpo",
]  # fmt: skip

FREE: tuple[str, ...] = ("orpo", "simpo", "cpo")
"""Losses without a reference."""

_DIVERGENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")


class PairLossSection(Section):
    name: Name
    """The loss, by TRL's names; its formula and paper stand in `losses/`."""
    weight: float = Field(1.0, gt=0)
    """Its weight in the sum."""


def _listed(value: Any) -> Any:
    """`sigmoid`, `{name: sigmoid, weight: 0.5}` or a list of either."""
    given = value if isinstance(value, list | tuple) else [value]
    return tuple({"name": one} if isinstance(one, str) else one for one in given)


class PreferenceTask(TaskSection):
    loss: Annotated[tuple[PairLossSection, ...], BeforeValidator(_listed)] = Field(
        (PairLossSection(name="sigmoid"),), min_length=1
    )
    """A loss, or several with weights, which are summed: `[{name: sigmoid}, {name: bco_pair, weight: 0.5}]`."""
    beta: float = Field(0.1, gt=0)
    """Strength of the losses: the larger, the closer the model is kept to the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that the answers of a pair are swapped, in the losses that know it; `exo_pair` needs some."""
    sft_weight: float | None = Field(None, ge=0)
    """Weight of the SFT loss of the chosen answer, a mean over its tokens; default: 1 for orpo and cpo, else 0."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """How the distance from the reference is measured (f-DPO, arXiv:2309.16240)."""
    f_alpha: float = 0.5
    """Alpha of `alpha_divergence`."""
    discopop_tau: float = Field(0.05, gt=0)
    """Temperature of the mix in discopop."""
    simpo_gamma: float = Field(0.5, ge=0)
    """Margin of simpo, within the sigmoid."""
    precompute_reference: bool = False
    """Compute the log-probabilities of the reference before the training, once; they are kept by content in
    `OUTPUT/reference`, so that a run which goes on reads them."""

    @property
    def needs_reference(self) -> bool:
        return any(one.name not in FREE for one in self.loss)

    @property
    def sft(self) -> float:
        """Weight of the SFT loss."""
        usual = float(any(one.name in ("orpo", "cpo") for one in self.loss))
        return usual if self.sft_weight is None else self.sft_weight

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [one.name for one in self.loss]
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError("exo_pair needs label_smoothing above 0, such as 1e-3")
        if self.f_divergence != "reverse_kl" and (other := [name for name in names if name not in _DIVERGENCES]):
            raise ValueError(f"f_divergence is not known for {', '.join(other)}")
        if self.precompute_reference and not self.needs_reference:
            raise ValueError("precompute_reference: this loss has no reference")
        return self


class PreferenceModel(LanguageModel):
    reference: LocalOrHub | None = None
    """Another model as the reference; default: the model as it is before the training. For a new adapter that is the
    model under it, for a saved one (`adapter`) that model with a frozen copy of the adapter; without a second copy of
    the model in either case."""


class PreferenceData(ChatData):
    shape: None = None
    """Rows are told apart by their keys."""


class PreferenceRecipe(Recipe):
    """What recipes of preferences, of pairs or of single answers, have in common."""

    model: PreferenceModel
    """What it starts from, and which parts are trained."""
    data: PreferenceData
    """What it is trained and evaluated on, and how long examples may be."""
    evaluate: ChatEvaluate = ChatEvaluate()
    """Evaluation during training and by `luthier evaluate`."""

    @model_validator(mode="after")
    def _known_ahead(self) -> Self:
        if getattr(self.task, "precompute_reference", False) and self.data.streaming:
            raise ValueError("precompute_reference needs the data at once; not with data.streaming")
        return self


class Config(PreferenceRecipe):
    task: PreferenceTask
    """What is trained: the losses, and the reference."""
