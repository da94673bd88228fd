"""The recipe of supervised fine-tuning."""

from __future__ import annotations

from ..config import ChatData, ChatEvaluate, LanguageRecipe


class Config(LanguageRecipe):
    data: ChatData
    """What it is trained and evaluated on, which tokens carry loss, and how long examples may be."""
    evaluate: ChatEvaluate = ChatEvaluate()
    """Evaluation during training and by `luthier evaluate`."""
