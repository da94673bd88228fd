"""What a source gives: rows of plain fields, each with the place it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data source, before any check.

    Args:
        fields: the row's own keys and values.
        where: `file:line` or `file#row`, for messages and reports.
        base: folder against which relative paths in the row are meant.
        source: name of the data set in the recipe.
    """

    fields: Mapping[str, Any]
    where: str
    base: Path
    source: str
