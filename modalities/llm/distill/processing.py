"""Conversations and prompts as tokens, whose documents are told in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....common.errors import BadExample
from ..processing import Encoded
from ..sft.processing import ChatProcessing
from .sampling import answer_begin


class DistillProcessing(ChatProcessing):
    """The data path of a recipe."""

    def examine(self, example: Any, training: bool) -> list[Encoded]:
        found = super().examine(example, training)
        if training and self.recipe.task.on_policy and any(not answer_begin(one.documents[0]) for one in found):
            raise BadExample("no_prompt", "the row has no prompt that the student could answer", where=example.where)
        return found

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """Also `documents`: the batch's documents, in order."""
        documents = [document for one in encoded for document in one.documents]
        return {**super().collate(encoded, generator), "documents": documents}
