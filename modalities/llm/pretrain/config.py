"""The recipe of continued pretraining."""

from __future__ import annotations

from ..config import LanguageRecipe, TextData


class Config(LanguageRecipe):
    data: TextData
    """What it is trained and evaluated on; texts stand one after another in blocks of `max_length`, so none is lost."""
