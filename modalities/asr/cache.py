"""Features on disk, keyed by content: the same audio with the same settings is computed once, on bounded space."""

from __future__ import annotations

import hashlib
import io
import os
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...common.bounded_folder import BoundedFolder
from .utterance import Utterance


class FeatureCache(BoundedFolder):
    """A folder of features as 16-bit floats (values lose about 0.05%).

    Args:
        folder: made if absent.
        max_bytes: most space of all files.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        super().__init__(folder, max_bytes, ".npy")

    def get(self, key: str) -> Tensor | None:
        """The features, as float32, or None if they aren't stored or the file is broken."""
        data = self.read(key)
        try:
            values = None if data is None else np.load(io.BytesIO(data), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return None if values is None or values.dtype != np.float16 else torch.from_numpy(values).float()

    def put(self, key: str, tensor: Tensor) -> None:
        """Store features; those of the same key are replaced."""
        file = io.BytesIO()
        np.save(file, tensor.detach().to("cpu", torch.float16).numpy(), allow_pickle=False)
        self.write(key, file.getvalue())


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
