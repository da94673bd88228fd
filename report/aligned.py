"""Reference and hypothesis word by word, for reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LONGEST = 600
"""Units of a text up to which it is aligned."""

Kind = Literal["same", "changed", "lost", "added"]


@dataclass(frozen=True)
class Piece:
    """A stretch of both texts.

    Args:
        kind: what became of it.
        said: of the reference.
        heard: of the hypothesis.
    """

    kind: Kind
    said: str = ""
    heard: str = ""


def aligned(reference: str, hypothesis: str) -> list[Piece]:
    """The fewest words that are changed, lost and added (Levenshtein); of a text that has no spaces, characters. Case
    and marks at the ends of words don't count as changes."""
    spaced = " " in reference.strip() or " " in hypothesis.strip()
    said, heard = (text.split() if spaced else list(text.strip()) for text in (reference, hypothesis))
    if max(len(said), len(heard)) > LONGEST:
        return [Piece("same" if reference == hypothesis else "changed", reference, hypothesis)]
    return _joined(_path(said, heard), " " if spaced else "")


def _plain(word: str) -> str:
    return word.strip(".,;:!?\"'()[]-–—…«»“”„¿¡").casefold() or word


def _path(said: Sequence[str], heard: Sequence[str]) -> list[Piece]:
    left, right = [_plain(word) for word in said], [_plain(word) for word in heard]
    table = [list(range(len(right) + 1))]
    for row, word in enumerate(left, 1):
        line = [row]
        for column, other in enumerate(right, 1):
            line.append(min(table[-1][column - 1] + (word != other), table[-1][column] + 1, line[-1] + 1))
        table.append(line)
    pieces, row, column = list[Piece](), len(left), len(right)
    while row or column:
        here = table[row][column]
        if row and column and here == table[row - 1][column - 1] + (left[row - 1] != right[column - 1]):
            row, column = row - 1, column - 1
            kind: Kind = "same" if left[row] == right[column] else "changed"
            pieces.append(Piece(kind, said[row], heard[column]))
        elif row and here == table[row - 1][column] + 1:
            row -= 1
            pieces.append(Piece("lost", said=said[row]))
        else:
            column -= 1
            pieces.append(Piece("added", heard=heard[column]))
    return pieces[::-1]


def _joined(pieces: Sequence[Piece], space: str) -> list[Piece]:
    """Neighbours of one kind as one."""
    found: list[Piece] = []
    for one in pieces:
        if found and found[-1].kind == one.kind:
            before = found.pop()
            one = Piece(
                one.kind,
                *(space.join(filter(None, pair)) for pair in ((before.said, one.said), (before.heard, one.heard))),
            )
        found.append(one)
    return found
