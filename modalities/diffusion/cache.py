"""Tensors on disk, keyed by content: what frozen parts of a model give is computed once, on bounded space."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...common.errors import ModelError

_LOG = logging.getLogger(__name__)
_ABANDONED_SECONDS = 3600


def rounded(tensor: Tensor) -> Tensor:
    """A tensor as float32 in the precision of the cache, whether it comes from it or is new, so that a resumed run,
    which finds more there, computes the same.

    Raises:
        ModelError: it has values beyond 16-bit floats.
    """
    found = tensor.half()
    if not torch.isfinite(found).all():
        raise ModelError(
            "values that 16-bit floats can't hold", where="data.cache", given=f"up to {float(tensor.abs().max()):.3g}"
        )
    return found.float()


def key(*parts: object) -> str:
    """SHA-256 (hex) of all that decides a value."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class TensorCache:
    """A folder of named tensors as 16-bit floats, shared by any number of processes.

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

    def get(self, name: str) -> dict[str, Tensor] | None:
        """The tensors, as float32, or None if they aren't stored or the file is broken."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self._path(name)
        try:
            tensors = load(path.read_bytes())
            os.utime(path)
        except (OSError, SafetensorError, ValueError):
            return None
        return {part: tensor.float() for part, tensor in tensors.items()}

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors; those of the same key are replaced."""
        from safetensors.torch import save

        data = save({part: tensor.detach().to("cpu", torch.float16).contiguous() for part, tensor in tensors.items()})
        if not self._works or len(data) > self.max_bytes:
            return
        try:
            self._store(self._path(name), data)
        except OSError as error:
            self._works = False
            _LOG.warning("%s: tensors can't be stored, going on without: %s", self.folder, error)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.safetensors"

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
            elif path.suffix in (".safetensors", ".tmp"):
                entries.append((status.st_mtime_ns, status.st_size, path))
        return entries
