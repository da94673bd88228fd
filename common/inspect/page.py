"""`luthier inspect --html`: batches as the model sees them, to be read, heard and seen."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from ..data.processing import Shown
from ..errors import BadExample
from ..pages.media import TYPES, Media
from ..pages.render import render
from ..record import write_text
from .batches import Looked, padding
from .statistics import Statistics

UNKNOWN = ("<unk>", "[UNK]", "<UNK>")
"""How tokenizers write what is not in their vocabulary."""


def write(looked: Looked, batches: int, file: Path, statistics: Statistics | None = None) -> None:
    """Write the page of the first batches.

    Args:
        looked: the data.
        batches: how many.
        file: to be written; one that is there is replaced.
        statistics: shown before them.
    """
    media = Media()
    shown = [
        {
            "number": batch.number,
            "examples": len(batch.indices),
            "padding": padding(batch),
            "bad": [str(error) for error in batch.bad],
            "rows": [_row(looked, batch.data, row, media) for row in range(len(batch.indices))],
        }
        for batch in looked.batches(batches)
    ]
    facts = {
        "title": f"Luthier: what {looked.recipe.task.kind} is trained on",
        "kind": looked.recipe.task.kind,
        "summary": f"{looked.train.part}{looked.train.report.summary()}",
        "dropped": looked.train.report.named,
        "statistics": statistics,
        "batches": shown,
        "media": media,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render("inspect.html", facts, Path(__file__).parent))


def _row(looked: Looked, data: Any, row: int, media: Media) -> dict[str, Any]:
    shown = looked.processing.show(data, row)
    try:
        found = looked.processing.beside(data, row)
    except BadExample as error:
        found = {"not shown": str(error)}
    kept = [
        (Path(name).stem, TYPES[Path(name).suffix], media.bytes(content, TYPES[Path(name).suffix]))
        for name, content in found.items()
        if isinstance(content, bytes)
    ]
    return {
        "title": shown.title,
        "facts": {**shown.facts, **{name: text for name, text in found.items() if isinstance(text, str)}},
        "parts": parts(shown),
        "media": kept,
        "drawing": "" if any(kind.startswith("image/") for _, kind, _ in kept) else shown.picture,
    }


def parts(shown: Shown) -> list[tuple[str, list[tuple[str, str]]]]:
    """(what it is, [(token, class)]) of each part of an example."""
    tokens = [
        (text, "unknown" if text.strip() in UNKNOWN else "loss" if carries_loss else "quiet")
        for text, carries_loss in shown.tokens
    ]
    begins = [*shown.parts, (len(tokens), "")] if shown.parts else [(0, ""), (len(tokens), "")]
    if begins[0][0] > 0:
        begins = [(0, ""), *begins]
    return [(name, tokens[begin:end]) for (begin, name), (end, _) in pairwise(begins)]
