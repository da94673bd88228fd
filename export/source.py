"""What a target is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..common.exportable import Exportable


@dataclass(frozen=True)
class Source:
    """A trained model on its way out.

    Args:
        exportable: how to write it and ask it.
        model: the checkpoint's `model/`.
        whole: the whole model as its library loads it, float32, adapters merged; None where the format has no use for
            it.
    """

    exportable: Exportable
    model: Path
    whole: Path | None

    @property
    def merged(self) -> Path:
        """The whole model's directory."""
        assert self.whole is not None
        return self.whole
