"""Hotwords of FunASR's contextual Paraformer, which hears a list of words beside the audio and attends to it.

In training the list is drawn from the texts of the batch, as FunASR's own data set draws it; in an evaluation it is
that of the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

NAME = "ContextualParaformer"
NONE = (1,)
"""`<s>`, which FunASR appends to every list: the word that a token attends to where it attends to none."""
SHORTEST, LONGEST = 2, 8
"""Tokens of a word that is drawn."""
_DRAWN, _TWICE = 0.75, 0.1
"""Shares of the texts that give a word, and of these, if long enough, that give two."""


def drawn(ids: Sequence[int], generator: np.random.Generator) -> list[tuple[int, ...]]:
    """Stretches of a text's tokens: none, one or two."""
    size = len(ids)
    if size < SHORTEST or generator.random() >= _DRAWN:
        return []
    if size == SHORTEST:
        return [tuple(ids)]

    def stretch(low: int, high: int, most: int) -> tuple[int, int]:
        """Begin and end of one that begins from `low` to `high`."""
        begin = int(generator.integers(low, high + 1))
        ends = (min(size, begin + SHORTEST), min(size, begin + most))
        return begin, int(generator.integers(ends[0], ends[1] + 1))

    if size > LONGEST + SHORTEST + 2 and generator.random() < _TWICE:
        begin, end = stretch(0, size // 3, min(LONGEST, size // 2))
        again = stretch(min(end, size - SHORTEST), size - SHORTEST, LONGEST)
        return [tuple(ids[begin:end]), tuple(ids[slice(*again)])]
    return [tuple(ids[slice(*stretch(0, size - SHORTEST, LONGEST))])]


def batch(words: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """What FunASR's loss takes: `hotword_pad` [H, L], padded with 0, and `hotword_lengths` [H]."""
    rows = [torch.tensor(word, dtype=torch.long) for word in (*words, NONE)]
    return {
        "hotword_pad": pad_sequence(rows, batch_first=True),
        "hotword_lengths": torch.tensor([len(row) for row in rows]),
    }


class Given:
    """Features in the place of FunASR's frontend, as this model's inference takes audio only.

    Args:
        features: [T, F].
        seconds: from one frame to the next.
    """

    cmvn_file = None

    def __init__(self, features: Tensor, seconds: float):
        self.features, self.fs = features, 16000
        self.frame_shift, self.lfr_n = 1000 * seconds, 1

    def __call__(self, _audio: Tensor, _length: Any, **_: Any) -> tuple[Tensor, Tensor]:
        return self.features[None], torch.tensor([len(self.features)])


@contextmanager
def listening(model: Any, words: Sequence[Sequence[int]]) -> Iterator[None]:
    """Context in which the model's inference attends to these words. FunASR finds them by itself in a text, a file or
    at an address, and takes a word that its dictionary lacks for an unknown token."""
    found = [list(word) for word in (*words, NONE)] if words else None
    model.generate_hotwords_list = lambda *_, **__: found
    try:
        yield
    finally:
        del model.generate_hotwords_list
