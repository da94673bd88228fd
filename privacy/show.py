"""What was found, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..common.console import console
from ..common.record import write_json

if TYPE_CHECKING:
    from .leak.measure import Leak
    from .scrub import Report


def report(found: Report) -> None:
    """Print how often each kind was found, and what it looks like."""
    table = Table("kind", "found", "distinct", "looks like")
    for kind, count in sorted(found.found.items(), key=lambda one: -one[1]):
        forms = dict.fromkeys(sample["form"] for sample in found.samples[kind])
        table.add_row(kind, str(count), str(found.distinct[kind]), ", ".join(list(forms)[:2]))
    console.print(table)
    lost = f"; {found.unreadable} could not be read and were left out" if found.unreadable else ""
    console.print(f"{found.changed} of {found.rows} rows changed{lost}", highlight=False)


def leaks(found: Sequence[Leak], output: Path | None) -> None:
    """Print exposure and extraction of what was planted and of what was not; write all to a file."""
    table = Table("canaries", "number", "mean exposure, bits", "largest", "extracted")
    for name, part in (
        ("planted", [one for one in found if one.canary.planted]),
        ("controls", [one for one in found if not one.canary.planted]),
    ):
        if part:
            bits = [one.exposure for one in part]
            said = sum(one.extracted for one in part)
            table.add_row(name, str(len(part)), f"{sum(bits) / len(bits):.2f}", f"{max(bits):.2f}", str(said))
    console.print(table)
    if output is not None:
        write_json(output, [asdict(one) for one in found])
