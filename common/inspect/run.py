"""`luthier inspect`: looks at the data of a recipe in the way that was asked for."""

from __future__ import annotations

from pathlib import Path

from ..console import console
from ..recipe import Recipe
from . import page, statistics, terminal
from .batches import Looked


def inspect(recipe: Recipe, batches: int = 1, html: Path | None = None, stats: bool = False) -> None:
    """Show the first training batches of a recipe.

    Args:
        recipe: whose data.
        batches: how many.
        html: write a page of them, with the statistics if they are asked for; None: print.
        stats: print statistics of all sets instead of batches.
    """
    looked = Looked.at(recipe)
    counted = statistics.statistics(looked) if stats else None
    if html is not None:
        page.write(looked, batches, html, counted)
        console.print(html, highlight=False)
    elif counted is not None:
        statistics.show(counted)
    else:
        terminal.inspect(looked, batches)
