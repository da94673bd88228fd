"""One example as token ids, and which of them carry loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORED = -100
"""Label of a token that carries no loss."""


@dataclass(frozen=True)
class Tokens:
    """Token ids of one example.

    Args:
        ids: [T] int64.
        trained: [T] bool; whether the model is to learn to say this token.
        cuttable: [T] bool; whether a length policy may remove the token: it belongs to what a user, a tool or a
            document says, and not to the system's message, to what the template writes, or to what carries loss.
        ends: ids of the tokens that end its trained turns.
        lost: messages that the chat template has left out.
    """

    ids: np.ndarray
    trained: np.ndarray
    cuttable: np.ndarray
    ends: frozenset[int] = frozenset()
    lost: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, where: np.ndarray) -> Tokens:
        """The tokens at some places, by index or by mask."""
        return Tokens(self.ids[where], self.trained[where], self.cuttable[where], self.ends, self.lost)

    @property
    def labels(self) -> np.ndarray:
        """[T] the ids where they carry loss, else -100; not shifted. Told by place, never by id: where padding and end
        share an id, the end still carries loss."""
        return np.where(self.trained, self.ids, IGNORED)


@dataclass(frozen=True, slots=True)
class Document:
    """What training needs of some tokens, small enough that a whole data set stays in memory: 5 bytes a token.

    Args:
        ids: [T] int32.
        trained: [T] bool.
    """

    ids: np.ndarray
    trained: np.ndarray

    @classmethod
    def of(cls, tokens: Tokens) -> Document:
        return cls(tokens.ids.astype(np.int32), tokens.trained.copy())

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Document:
        """The tokens [start, stop), in the same memory."""
        return Document(self.ids[start:stop], self.trained[start:stop])
