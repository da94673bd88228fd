"""Batches as the model sees them: in full by `luthier inspect`, and one screen of the first at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.text import Text

from ..console import console
from ..data.processing import Batch, Processing, Shown
from .batches import Looked, padding


def inspect(looked: Looked, batches: int = 1) -> None:
    """Print the first training batches: each example's facts, input and tokens, those that carry loss in green."""
    console.print(f"train: {looked.train.part}{looked.train.report.summary()}", highlight=False)
    for lines in looked.train.report.named.values():
        console.print("\n".join(lines), highlight=False, markup=False)
    for batch in looked.batches(batches):
        console.rule(f"batch {batch.number}: {len(batch.indices)} examples, {padding(batch):.0%} padding")
        for error in batch.bad:
            console.print(str(error), highlight=False, markup=False)
        for row in range(len(batch.indices)):
            _print(looked.processing.show(batch.data, row))


SCREEN, EACH = 16, 4
"""Lines that a first batch takes at most, and one example of it."""
STRETCH = 160
"""Characters shown of what carries loss, or does not, in one piece."""


def glance(processing: Processing[Any], batch: Batch) -> None:
    """Print the begin of a batch on one screen: what carries loss in green, or between « and » where there is no
    colour; long stretches without their middle."""
    width = min(console.width, 120)
    marks = ("", "") if console.color_system else ("«", "»")
    console.print(Text("first batch, what carries loss ", style="bold").append("in green" if not marks[0] else "in «»"))
    room, done = SCREEN, 0
    while done < len(batch.indices):
        shown = processing.show(batch.data, done)
        line = Text(f"{shown.title}  ", style="bold")
        for text, carries_loss in _stretches(shown):
            text = text.join(marks) if carries_loss else text
            line.append(text, style="not bold green" if carries_loss else "not bold")
        line.truncate(EACH * width, overflow="ellipsis")
        needed = -(-len(line) // width)
        if needed > room:
            break
        console.print(line)
        room -= needed
        done += 1
    if done < len(batch.indices):
        console.print(f"... and {len(batch.indices) - done} more: see `luthier inspect`", highlight=False)


def _stretches(shown: Shown) -> Iterator[tuple[str, bool]]:
    """The tokens as text, in stretches with and without loss, on one line."""
    for carries_loss, pieces in groupby(shown.tokens, key=lambda piece: piece[1]):
        text = "".join(piece for piece, _ in pieces).replace("\n", "⏎")
        half = STRETCH // 2
        yield (text if len(text) <= STRETCH else f"{text[:half]} ... {text[-half:]}"), carries_loss


def _print(shown: Shown) -> None:
    console.print(Text(shown.title, style="bold"))
    for name, value in shown.facts.items():
        console.print(f"  {name:>10}  {value}", highlight=False, markup=False)
    line = Text("      tokens  ")
    begins = dict(shown.parts)
    for at, (text, carries_loss) in enumerate(shown.tokens):
        if at in begins:
            line.append(f"\n      {begins[at]}: ", style="bold")
        line.append(text, style="green" if carries_loss else "dim")
        line.append("|", style="dim")
    console.print(line)
    if shown.picture:
        console.print(shown.picture, highlight=False, markup=False)
