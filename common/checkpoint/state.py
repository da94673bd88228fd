"""Reading and writing `state/`: what resuming needs besides the model that others load."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from ..errors import CheckpointError

FILE = "trainer.pt"


class TensorIO(CheckpointIO):
    """Lightning's checkpoint dictionary in one file of tensors and plain values; no code is ever unpickled.

    The file is written straight to its place: the folder around it becomes a checkpoint only when it is committed.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        with Path(path).open("wb") as stream:  # torch's own writer hides what the system said
            torch.save(checkpoint, stream)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                "the state can't be read, or holds more than tensors and plain values", where=path, given=reason
            ) from error
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)
