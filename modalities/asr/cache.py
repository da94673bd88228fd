"""Features on disk, keyed by content: the same audio with the same settings is computed once, on bounded space."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .utterance import Utterance

_LOG = logging.getLogger(__name__)
_ABANDONED_SECONDS = 3600


class FeatureCache:
    """A folder of features as 16-bit floats (values lose about 0.05%), shared by any number of processes.

    Files are written whole or not at all. Before the folder would pass its bound, the files unused for longest go. A
    process looks at the whole folder again after each 1% of the bound that it writes, so several writers can pass the
    bound by about 1% each until then. A full or read-only disk costs speed, not the run: nothing more is then stored.

    Args:
        folder: made if absent.
        max_bytes: most space of all files.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._total = 0
        self._unseen = max_bytes
        self._works = True

    def get(self, key: str) -> Tensor | None:
        """The features, as float32, or None if they aren't stored or the file is broken."""
        path = self._path(key)
        try:
            values = np.load(path, allow_pickle=False)
            os.utime(path)
        except (OSError, ValueError, EOFError):
            return None
        return torch.from_numpy(values).float() if values.dtype == np.float16 else None

    def put(self, key: str, tensor: Tensor) -> None:
        """Store features; those of the same key are replaced."""
        values = tensor.detach().to("cpu", torch.float16).numpy()
        if not self._works or values.nbytes > self.max_bytes:
            return
        try:
            self._store(self._path(key), values)
        except OSError as error:
            self._works = False
            _LOG.warning("%s: features can't be stored, going on without: %s", self.folder, error)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.npy"

    def _store(self, path: Path, values: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, values, allow_pickle=False)
                size = file.tell()
            self._make_room(size, Path(temporary))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._total += size
        self._unseen += size

    def _make_room(self, size: int, own: Path) -> None:
        """Delete the files unused for longest until `size` more bytes fit."""
        if self._total + size <= self.max_bytes and self._unseen < self.max_bytes // 100:
            return
        files = [entry for entry in self._files() if entry[2] != own]
        self._total, self._unseen = sum(entry[1] for entry in files), 0
        if self._total + size <= self.max_bytes:
            return
        # A little more than needed goes, so that a full cache is not listed at every write.
        goal = self.max_bytes - max(size, self.max_bytes // 20)
        for _, length, path in sorted(files):
            if self._total <= goal:
                break
            if path.suffix != ".tmp":  # another process is still writing it
                path.unlink(missing_ok=True)
                self._total -= length

    def _files(self) -> list[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of each file; what a killed process left half-written is deleted."""
        entries = []
        for path in self.folder.glob("??/*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix == ".tmp" and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                path.unlink(missing_ok=True)
            elif path.suffix in (".npy", ".tmp"):
                entries.append((status.st_mtime_ns, status.st_size, path))
        return entries


def key(utterance: Utterance, settings: str) -> str:
    """SHA-256 (hex) of the audio's bytes, its piece and channel, and of `settings`: all else that decides the features.

    A file's bytes are read once and its digest kept by path, size and time of change.
    """
    audio = utterance.audio
    if callable(audio):
        content = hashlib.sha256(audio()).hexdigest()
    else:
        status = os.stat(audio)
        content = _digest(audio, status.st_size, status.st_mtime_ns)
    parts = (content, utterance.start, utterance.end, utterance.channel, settings)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@lru_cache(maxsize=1 << 16)
def _digest(path: str, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
