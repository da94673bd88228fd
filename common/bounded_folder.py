"""A folder of small files on bounded space, for what is computed once: features, latents, embeddings."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

_LOG = logging.getLogger(__name__)
_ABANDONED_SECONDS = 3600


class BoundedFolder:
    """Named contents, shared by any number of processes.

    Files are written whole or not at all. Before the folder would pass its bound, the files unused for longest go. A
    process looks at the whole folder again after each 1% of the bound that it writes, so several writers can pass the
    bound by about 1% each until then. A full or read-only disk costs speed, not the run: nothing more is then stored.

    Args:
        folder: made if absent.
        max_bytes: most space of all files.
        suffix: of the files.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, suffix: str):
        self.folder, self.max_bytes, self.suffix = Path(folder), max_bytes, suffix
        self._total = 0
        self._unseen = max_bytes
        self._works = True

    def read(self, name: str) -> bytes | None:
        """The content, which counts as used now; None if there is none or it can't be read."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data

    def write(self, name: str, data: bytes) -> None:
        """Store a content; one of the same name is replaced."""
        if not self._works or len(data) > self.max_bytes:
            return
        try:
            self._store(self._path(name), data)
        except OSError as error:
            self._works = False
            _LOG.warning("%s: what is computed can't be stored, going on without: %s", self.folder, error)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}{self.suffix}"

    def _store(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            self._make_room(len(data), Path(temporary))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._total += len(data)
        self._unseen += len(data)

    def _make_room(self, size: int, written: Path) -> None:
        """Delete the files unused for longest until `size` more bytes fit."""
        if self._total + size <= self.max_bytes and self._unseen < self.max_bytes // 100:
            return
        files = [entry for entry in self._files() if entry[2] != written]
        self._total, self._unseen = sum(entry[1] for entry in files), 0
        if self._total + size <= self.max_bytes:
            return
        # A little more than needed goes, so that a full folder is not listed at every write.
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
            elif path.suffix in (self.suffix, ".tmp"):
                entries.append((status.st_mtime_ns, status.st_size, path))
        return entries
