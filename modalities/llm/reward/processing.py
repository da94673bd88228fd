"""Answers that are compared or judged, as tokens, for a model that scores them."""

from __future__ import annotations

import math
from typing import Any

from ....common.errors import BadExample
from ..conversation import Conversation, Text
from ..dpo.processing import PreferenceProcessing
from ..generate import Prompt
from ..lengths import Cut
from ..preferences import Preference
from ..tokens import Tokens


class RewardProcessing(PreferenceProcessing):
    """The data path of a recipe."""

    @property
    def judged(self) -> bool:  # type: ignore[override]
        return bool(self.recipe.task.judges)

    def prompt_of(self, item: Conversation | Text, tokens: Tokens, taken: Cut) -> Prompt | None:
        return None

    def label_of(self, item: Preference) -> Any:
        """A number, or the number of a class."""
        if not self.judged:
            return None
        labels = self.recipe.task.labels
        if labels is not None:
            if str(item.label) not in labels:
                raise _bad(item, f"one of {', '.join(labels)}")
            return labels.index(str(item.label))
        if isinstance(item.label, str) or not math.isfinite(float(item.label)):
            raise _bad(item, "a finite number")
        return float(item.label)


def _bad(item: Preference, expected: str) -> BadExample:
    return BadExample("bad_label", "'label' can't be used", where=item.where, given=item.label, expected=expected)


def padding(tokenizer: Any, ends: tuple[int, ...]) -> int | None:
    """Id of a token for padding that ends no sequence, so that whoever looks for the last token that is no padding, as
    transformers does, finds the right one. None: there is no such token; then sequences have to be scored one by one.

    Args:
        tokenizer: whose padding may be its end token.
        ends: ids that may end a sequence.
    """
    taken = {*ends, tokenizer.eos_token_id}
    added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    known = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *added]
    return next((int(one) for one in known if one is not None and one not in taken), None)
