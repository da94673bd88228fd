"""What became of the keys of another tool's file, as a table."""

from __future__ import annotations

from collections import Counter

from rich.markup import escape
from rich.table import Table

from ..common.console import console
from ..common.secrets import without_secrets
from .draft import shown
from .engine import Imported

_STYLE = {"mapped": "green", "not needed": "dim", "default": "cyan", "unsupported": "red"}
"""Colours, in the order in which keys are shown."""


def show(found: Imported) -> None:
    """Print the keys, those that could not be carried over last, and their numbers."""
    table = Table(
        "key", "value", "", "in the recipe, or why not", title=f"a file of {found.tool}", title_justify="left"
    )
    for line in sorted(found.lines, key=lambda one: list(_STYLE).index(one.status)):
        style = _STYLE[line.status]
        value = "" if line.value is None else escape(shown(without_secrets(line.value, line.key)))
        table.add_row(escape(line.key), value, f"[{style}]{line.status}[/{style}]", escape(line.told))
    console.print(table)
    counts = Counter(line.status for line in found.lines)
    console.print(", ".join(f"{counts[status]} {status}" for status in counts), highlight=False)
