"""Texts on disk: any number of them in little memory."""

from __future__ import annotations

import hashlib
import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import overload

import numpy as np

from ..example import key_of


class Texts(Sequence[str]):
    """Distinct texts in a file, in the order in which each came first; takes 32 bytes of memory for each.

    Args:
        path: UTF-8 texts one after the other.
        keys: [n] `key_of` each text in the file; equal ones are one text.
        ends: [n] byte in the file where each ends.
        digest: SHA-256 (hex) of the texts.
    """

    def __init__(self, path: Path, keys: np.ndarray, ends: np.ndarray, digest: str):
        self._keys, first = np.unique(keys, return_index=True)
        places = np.sort(first)
        self._numbers = np.searchsorted(places, first)
        self._starts = np.concatenate([[0], ends])[places]
        self._ends = ends[places]
        self.digest = digest
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(places) else b""

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self._bytes[int(self._starts[at]) : int(self._ends[at])].decode("utf-8")

    def numbers(self, keys: np.ndarray) -> np.ndarray:
        """Places [n] of the texts with these keys [n], all of which are here."""
        found: np.ndarray = self._numbers[np.searchsorted(self._keys, keys)]
        return found


class TextsWriter:
    """Writes `Texts`: `with TextsWriter(path) as texts: texts.add(...)`, then `texts.finished()`."""

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("wb")
        self._keys, self._ends = array("q"), array("q")
        self._hash = hashlib.sha256()

    def __enter__(self) -> TextsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, text: str) -> int:
        """The text's key."""
        data, key = text.encode("utf-8"), key_of(text)
        self._file.write(data)
        self._hash.update(len(data).to_bytes(8, "big") + data)
        self._keys.append(key)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(data))
        return key

    def finished(self) -> Texts:
        """The texts, once the file is closed."""
        keys, ends = np.array(self._keys, np.int64), np.array(self._ends, np.int64)
        return Texts(self._path, keys, ends, self._hash.hexdigest())
