"""What a recipe asks for: the engine that draws completions and what judges them, here or elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..model import Head
from .engines.engine import Engine
from .engines.http import HttpEngine
from .engines.local import LocalEngine
from .rewards.answer import Judging
from .rewards.rewards import Rewards

WEIGHTS = "weights"
"""Folder in the run's output from which servers are given weights."""


def engine(recipe: Any, weights: Path | None, causal: Any, head: Head) -> Engine:
    """What draws completions.

    Args:
        recipe: of the training.
        weights: directory of a saved model, if the trainer's was loaded from one.
        causal: the trainer's transformers model.
        head: its output layer.
    """
    section = recipe.rollout
    if section.engine != "local":
        return HttpEngine(section.engine, Path(recipe.output, WEIGHTS))
    if section.placement is None or section.placement.engines is None:
        return LocalEngine(causal, head, section.batch)
    from .placed.engine import PlacedEngine

    return PlacedEngine(recipe, weights)


def rewards(recipe: Any) -> Judging:
    """What judges completions.

    Raises:
        LuthierError: a reward can't be used; one that is placed says so when it is first asked.
    """
    placement = recipe.rollout.placement
    if placement is None or placement.rewards is None:
        return Rewards(recipe.rewards)
    from .placed.rewards import PlacedRewards

    return PlacedRewards(recipe.rewards, placement)
