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


@dataclass(slots=True)
class Cursor:
    """Where a reader stands in a source, so that another one can begin there.

    Args:
        place: begin of the row that follows the one given last, in the reader's own terms, as plain values (numbers,
            texts, lists, mappings); None: the begin of the source, or a format in which a reader can't begin elsewhere.
    """

    place: Any = None
