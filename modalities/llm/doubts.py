"""What can be wrong with the training data of a language model, though no row alone is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ...common.errors import DataError, LuthierError
from .tokens import Document

LOOKED_AT = 1000
"""Documents that are looked at."""
MOST = 0.5
"""Share of the examples above which what happens to them is no exception."""


def of_ends(documents: Iterable[Document], ends: Sequence[int], tokenizer: Any) -> Iterator[LuthierError]:
    """Whether answers end with a token at which generation stops: else the model learns to go on for ever.

    Args:
        documents: whose end has not been cut.
        ends: ids at which generation stops.
        tokenizer: for the message.
    """
    last = [int(one.ids[np.flatnonzero(one.trained)[-1]]) for one in islice(documents, LOOKED_AT) if one.trained.any()]
    without = [number for number in last if number not in ends]
    if len(without) > MOST * len(last):
        yield DataError(
            "answers have no end token, so that the model would not learn to stop",
            where="chat template",
            given=f"{len(without)} of {len(last)} answers, such as one that ends with {tokenizer.decode(without[0])!r}",
            expected=", or ".join(repr(tokenizer.decode(number)) for number in ends) or "there is no EOS",
            do="give a chat template that ends an assistant's turn with such a token: data.chat_template",
        )


def of_cuts(notes: Sequence[Mapping[str, int]]) -> Iterator[LuthierError]:
    """Whether most answers lose their end.

    Args:
        notes: of the examples, as `Processing.notes` gives them.
    """
    cut = sum("answer tokens cut" in one for one in notes)
    if cut > MOST * len(notes):
        yield DataError(
            "most answers are cut, and with them the token that ends them",
            where="data.max_length",
            given=f"{cut} of {len(notes)} examples",
            do="raise data.max_length",
        )


def of_labels(labels: Sequence[Any]) -> Iterator[LuthierError]:
    """Whether what is judged is judged differently at all; None where nothing is judged."""
    if len(labels) > 1 and None not in labels and len({repr(label) for label in labels}) == 1:
        yield DataError(
            "every label is the same, so there is nothing to tell apart",
            where="data.train",
            given=f"{labels[0]!r} {len(labels)} times",
            do="add answers that are judged otherwise",
        )
