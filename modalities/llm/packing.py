"""Continued pretraining: documents one after another, cut into full blocks.

No document sees another one: each piece has positions from 0, attends to itself, and has no loss on its first token,
which only the document before could predict (see `batch.join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tokens import Document


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a document, in tokens: [start, stop)."""

    document: int
    start: int
    stop: int


def blocks(lengths: Sequence[int], max_length: int) -> list[tuple[Piece, ...]]:
    """The documents one after another, cut into blocks of exactly `max_length` tokens.

    No token is lost and none is written over; only the last block may be shorter. End tokens are to be part of the
    documents (see `chat.encode_plain`), so that they stand between them.

    Args:
        lengths: [N] tokens of each document, with its end token; in the order in which they are joined.
        max_length: tokens of a block.
    """
    found: list[tuple[Piece, ...]] = []
    block: list[Piece] = []
    room = max_length
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(int(length), start + room)
            block.append(Piece(document, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                found.append(tuple(block))
                block, room = [], max_length
    return [*found, tuple(block)] if block else found


def block(pieces: Sequence[Piece], documents: Sequence[Document]) -> tuple[Document, ...]:
    """The pieces of a block."""
    return tuple(documents[piece.document].part(piece.start, piece.stop) for piece in pieces)
