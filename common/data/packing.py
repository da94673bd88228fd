"""Putting items of different sizes into few containers, none of them cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import DataError


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[tuple[int, ...]]:
    """Put documents into rows of at most `capacity` tokens by best fit decreasing; each is in exactly one row.

    The longest comes first, and goes where the least room is left (of equal rows, to the one filled last). Of equal
    lengths the earlier comes first, so another order gives other rows: shuffle before. At most 11/9 of the fewest rows
    possible, plus one (Johnson, 1973).

    Args:
        lengths: [N] tokens of each document.
        capacity: tokens of a row.

    Returns:
        Numbers of the documents of each row, each row's longest first.

    Raises:
        DataError: a document without tokens, or longer than a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.min() < 1 or sizes.max() > capacity):
        worst = int(np.argmin(sizes) if sizes.min() < 1 else np.argmax(sizes))
        raise DataError(
            "a document can't be packed",
            where=f"document {worst}",
            given=f"{sizes[worst]} tokens",
            expected=f"1 to {capacity}",
            do="cut the examples to the length of a row before",
        )
    rows: list[list[int]] = []
    rooms = _Rooms(capacity)
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        found = rooms.take(size)
        if found is None:
            found = capacity, len(rows)
            rows.append([])
        room, row = found
        rows[row].append(document)
        rooms.put(room - size, row)
    return [tuple(row) for row in rows]


class _Rooms:
    """Rows by the tokens that they have left. Which numbers of tokens occur is kept as bits, in words of 1024, so that
    the least that suffices is found by two shifts."""

    def __init__(self, capacity: int):
        self.rows: dict[int, list[int]] = {}
        self.words = [0] * ((capacity >> 10) + 1)
        self.filled = 0  # the words that are not 0

    def put(self, room: int, row: int) -> None:
        """A row with some tokens left; a full one is done with."""
        if room:
            self.rows.setdefault(room, []).append(row)
            self.words[room >> 10] |= 1 << (room & 1023)
            self.filled |= 1 << (room >> 10)

    def take(self, size: int) -> tuple[int, int] | None:
        """(tokens left, row) of the row with the least room that holds `size` tokens; None if there is none."""
        word = size >> 10
        bits = self.words[word] >> (size & 1023)
        if bits:
            room = size + _lowest(bits)
        elif higher := self.filled >> (word + 1):
            word += 1 + _lowest(higher)
            room = (word << 10) + _lowest(self.words[word])
        else:
            return None
        row = self.rows[room].pop()
        if not self.rows[room]:
            self.words[word] ^= 1 << (room & 1023)
            self.filled ^= 0 if self.words[word] else 1 << word
        return room, row


def _lowest(bits: int) -> int:
    """Place of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
