"""Where engines and reward workers run, if not in the process of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from .....common.recipe import Section


class WorkersSection(Section):
    """Workers of one kind."""

    number: int = Field(1, ge=1)
    """Workers of each process of the training."""
    cpus: float = Field(1.0, ge=0)
    """CPU cores that Ray keeps for each."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that Ray keeps for each; 0: it computes on the CPU."""
    resources: Mapping[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """What else Ray keeps for each, by the names that machines were started with (`ray start --resources`)."""


class PlacementSection(Section):
    """Processes that Ray places on machines which have room. All machines need this package, and see the same paths."""

    address: str = "local"
    """Of the Ray cluster: `local`, one of its own on this machine; `auto`, the one that this machine is part of; or
    `host:port`."""
    engines: WorkersSection | None = None
    """Draw completions, each with a model of its own, which is given the weights; default: the trainer's model does."""
    rewards: WorkersSection | None = None
    """Judge completions, those of a prompt together; default: the process of the training does."""
    start_timeout: float = Field(600, gt=0)
    """Seconds until a worker has found its place and loaded its model."""
    timeout: float = Field(1800, gt=0)
    """Seconds for what a worker is asked at a time: `rollout.batch` completions, or its share of the rewards."""
    restarts: int = Field(3, ge=0)
    """How often a worker that dies or is too slow is started again for what it was asked, before the run ends."""

    @model_validator(mode="after")
    def _places_something(self) -> Self:
        if self.engines is None and self.rewards is None:
            raise ValueError("nothing is placed; give engines, rewards or both, such as engines.number=2")
        return self
