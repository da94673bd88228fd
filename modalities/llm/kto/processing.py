"""Single answers, and beside each, for the estimate of the KL, the answer of another row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ....common.errors import BadExample
from ..batch import Group
from ..dpo.processing import Compared, PreferenceProcessing
from ..preferences import Preference
from ..tokens import Document


class KtoProcessing(PreferenceProcessing):
    """The data path of a recipe."""

    judged = True

    def label_of(self, item: Preference) -> bool:
        if item.label not in (True, False):  # 1 and 0 too
            raise BadExample(
                "bad_label", "'label' can't be used", where=item.where, given=item.label, expected="true or false"
            )
        return bool(item.label)

    def arrange(self, examples: list[Any], training: bool) -> list[Any]:
        """Each with the answer of the next one that has another prompt, as a second answer: what is paired depends on
        the data and never on a batch, and no answer is paired with its own prompt. Where all prompts are the same there
        is none."""
        if self.recipe.task.loss != "kto":
            return examples
        whole = [one.group.document(0) for one in examples]
        prompts = [document.ids[: _begin(document)].tobytes() for document in whole]
        return [self._beside(one, whole, prompts, at) for at, one in enumerate(examples)]

    def _beside(self, example: Compared, whole: list[Document], prompts: list[bytes], at: int) -> Compared:
        order = (other % len(whole) for other in range(at + 1, at + len(whole)))
        other = next((number for number in order if prompts[number] != prompts[at]), None)
        if other is None:
            return example
        own = whole[at]
        begin, answer = _begin(own), _begin(whole[other])
        room = max(1, self.recipe.data.max_length - begin)
        parts = own.part(0, begin), whole[other].part(answer, answer + room)
        mixed = Document(np.concatenate([p.ids for p in parts]), np.concatenate([p.trained for p in parts]))
        if np.array_equal(mixed.ids, own.ids):  # the same answer to another prompt: it would share all of itself
            return example
        return replace(example, group=Group.of([own, mixed]))


def _begin(document: Document) -> int:
    """Tokens before the answer."""
    return int(np.argmax(document.trained))
