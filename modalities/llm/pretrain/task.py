"""Continued pretraining: every token of every text carries loss."""

from __future__ import annotations

from pathlib import Path

from ..causal import CausalTask
from .config import Config
from .processing import BlockProcessing


class Task(CausalTask):
    """Trains a causal language model, or an adapter of it, on blocks of text."""

    recipe: Config
    processing: BlockProcessing

    @classmethod
    def make_processing(cls, recipe: Config, weights: Path | None = None) -> BlockProcessing:
        return BlockProcessing(recipe, weights)
