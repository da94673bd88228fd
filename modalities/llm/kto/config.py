"""The recipe of KTO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ....common.recipe import TaskSection
from ..dpo.config import PreferenceData, PreferenceRecipe


class KtoTask(TaskSection):
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """KTO (arXiv:2402.01306), or APO-zero of single answers (arXiv:2408.06266), which needs no estimate of the KL."""
    beta: float = Field(0.1, gt=0)
    """How soon the loss of an answer saturates; the larger, the closer the model stays to the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of good answers; with the other one such that both weigh about the same in the data."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of bad answers."""
    precompute_reference: bool = False
    """Compute the log-probabilities of the reference before the training, once; they are kept by content in
    `OUTPUT/reference`."""


class Config(PreferenceRecipe):
    task: KtoTask
    """What is trained: the loss, and the reference."""
    data: PreferenceData
    """What it is trained and evaluated on: rows of `prompt`, `completion` and `label`."""
