"""A teacher's most probable tokens on disk, by content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....common.bounded_folder import BoundedFolder
from ....common.errors import RecipeError
from ..losses.divergence import Top
from ..reference import key_of
from ..tokens import Document


class Stored:
    """What a teacher says of documents; a file each.

    Args:
        folder: of the files.
        teacher: fingerprint of the teacher, and all else that its numbers depend on.
        k: ids at each place.
        max_bytes: most space of all files.
    """

    def __init__(self, folder: Path, teacher: str, k: int, max_bytes: int):
        self._files = BoundedFolder(folder, max_bytes, ".top")
        self._teacher, self._k, self._max_bytes = teacher.encode(), k, max_bytes

    def check_room(self, documents: Sequence[Document]) -> None:
        """Refuse documents that can't all be kept: what is thrown away would be computed again in every epoch.

        Raises:
            RecipeError: it says how much room they need.
        """
        needed = sum((8 * self._k + 4) * int(one.trained[1:].sum()) + 300 for one in documents)
        if needed > self._max_bytes:
            raise RecipeError(
                "the teacher's log-probabilities don't fit",
                where="task.max_gb",
                given=f"{self._max_bytes / 1e9:g} GB",
                expected=f"{needed / 1e9:.3g} GB for top_k: {self._k}",
                do="raise task.max_gb, or lower task.top_k",
            )

    def read(self, document: Document) -> Top | None:
        """Of the tokens of a document that carry loss, in order; None: it is not there."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        data = self._files.read(self._name(document))
        try:
            kept = None if data is None else load(data)
        except SafetensorError:
            return None
        return None if kept is None else Top(kept["ids"].long(), kept["log_probs"], kept.get("rest"))

    def write(self, document: Document, found: Top) -> None:
        from safetensors.torch import save

        kept: dict[str, Tensor] = {"ids": found.ids.int(), "log_probs": found.log_probs}
        if found.rest is not None:
            kept["rest"] = found.rest
        self._files.write(self._name(document), save({name: one.cpu().contiguous() for name, one in kept.items()}))

    def missing(self, documents: Sequence[Document]) -> list[Document]:
        """Those that are not there, each once."""
        return list({self._name(one): one for one in documents if self.read(one) is None}.values())

    def _name(self, document: Document) -> str:
        return hashlib.blake2b(self._teacher + key_of(document), digest_size=16).hexdigest()


def parts(whole: Top, counts: Sequence[int]) -> list[Top]:
    """Cut into documents of so many tokens."""
    sizes = list(counts)
    rests = [None] * len(sizes) if whole.rest is None else whole.rest.split(sizes)
    return [Top(*part) for part in zip(whole.ids.split(sizes), whole.log_probs.split(sizes), rests, strict=True)]


def joined(tops: Sequence[Top], device: torch.device) -> Top:
    """One after the other, on a device."""
    rests = [one.rest for one in tops if one.rest is not None]
    return Top(
        torch.cat([one.ids for one in tops]).to(device),
        torch.cat([one.log_probs for one in tops]).to(device),
        torch.cat(rests).to(device) if rests else None,
    )


def targets_of(document: Document) -> int:
    """Tokens of a document that carry loss; its first one never does."""
    return int(np.count_nonzero(document.trained[1:]))
