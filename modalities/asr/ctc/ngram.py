"""An n-gram language model of words in ARPA's form, as KenLM and SRILM write it."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from pathlib import Path

from ....common.errors import ModelError

START, END, UNKNOWN = "<s>", "</s>", "<unk>"
_NEVER = -7.0
"""Log10 of the probability of a word that the model knows nothing of, not even an unknown word's."""

History = tuple[str, ...]


class NGram:
    """Back-off n-grams (Katz 1987).

    Args:
        path: ARPA file, plain or with gzip.

    Raises:
        ModelError: it is none.
    """

    def __init__(self, path: str):
        self._found: dict[History, tuple[float, float]] = {}
        self.order = 0
        for order, words, probability, backoff in _entries(path):
            self.order = max(self.order, order)
            self._found[words] = probability, backoff

    @property
    def start(self) -> History:
        """What precedes the first word."""
        return (START,) if self.order > 1 else ()

    def score(self, history: History, word: str) -> tuple[float, History]:
        """(log-probability in nats of a word after others, what precedes the next one)."""
        word = word if (word,) in self._found else UNKNOWN
        weight, context = 0.0, history
        while (*context, word) not in self._found and context:
            weight += self._found.get(context, (0.0, 0.0))[1]
            context = context[1:]
        probability = self._found.get((*context, word), (_NEVER, 0.0))[0]
        keep = self.order - 1
        return (weight + probability) * math.log(10), (*history, word)[-keep:] if keep else ()


def _entries(path: str) -> Iterator[tuple[int, History, float, float]]:
    """(order, words, log10 probability, log10 of the back-off weight) of each n-gram."""
    order, seen = 0, False
    opened = gzip.open if Path(path).suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for line in file:
                line = line.strip()
                if line == "\\end\\":
                    return
                if line.startswith("\\"):
                    seen = seen or line == "\\data\\"
                    order = int(line[1:].split("-")[0]) if line.endswith("-grams:") else 0
                elif order and line:
                    parts = line.split()
                    backoff = float(parts[order + 1]) if len(parts) > order + 1 else 0.0
                    yield order, tuple(parts[1 : order + 1]), float(parts[0]), backoff
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"not readable as an ARPA file: {error}", where="evaluate.lm", given=path) from error
    raise ModelError(
        "the file is no language model, or cut off",
        where="evaluate.lm",
        given=path,
        expected="an ARPA file" if not seen else "a line `\\end\\`",
    )
