"""Versions of models as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ..common.console import console
from .registry import Version


def listed(versions: Sequence[Version]) -> None:
    """One line for each version."""
    table = Table("model", "version", "stage", "format", "base", "metric", "license", title_justify="left")
    for one in versions:
        name = one.parity.get("deciding_metric", "")
        value = f"{name} {one.metrics[name]:.4f}" if name in one.metrics else "not evaluated"
        form = f"{one.facts['format']} {one.facts['dtype']}"
        table.add_row(
            one.name,
            str(one.number),
            one.stage,
            form,
            one.facts["base"]["name"],
            value,
            one.facts["licenses"]["output"],
        )
    console.print(table)


def shown(one: Version) -> None:
    """All that is known of a version."""
    licenses, parity = one.facts["licenses"], one.parity
    rows = {
        "stage": one.stage,
        "artifact": one.source,
        "SHA-256": one.sha256,
        "kind": one.facts["kind"],
        "format": f"{one.facts['format']} {one.facts['dtype']}",
        "checkpoint": one.facts["checkpoint"]["name"],
        "base model": f"{one.facts['base']['name']} {one.facts['base']['sha256'] or '(no hash)'}",
        **{f"data, {name}": _pairs(files) for name, files in one.facts["data"].items()},
        "licenses": "; ".join(f"{work}: {name}" for work, name in licenses["stated"].items()),
        "so": " ".join(licenses["lines"]),
        "largest difference": f"{parity['largest_difference']:.3g}" if parity else "no parity report",
        **{name: f"{value:.4f}" for name, value in {**one.metrics, **one.slices}.items()},
        "lacks": "; ".join(one.lacks()) or "nothing",
    }
    table = Table(f"{one.name} {one.number}", "", title_justify="left")
    for key, value in rows.items():
        table.add_row(key, str(value))
    console.print(table)


def compared(one: Version, other: Version) -> None:
    """Two versions side by side."""
    table = Table("", f"{one.name} {one.number}", f"{other.name} {other.number}", "change", title_justify="left")
    table.add_row("stage", one.stage, other.stage)
    table.add_row("format", *(f"{each.facts['format']} {each.facts['dtype']}" for each in (one, other)))
    table.add_row("base model", *(str(each.facts["base"]["name"]) for each in (one, other)))
    table.add_row("same data", "", "yes" if one.facts["data"] == other.facts["data"] else "no")
    values = [{**each.metrics, **each.slices} for each in (one, other)]
    for name in dict.fromkeys([*values[0], *values[1]]):
        first, second = values[0].get(name), values[1].get(name)
        change = f"{second - first:+.4f}" if first is not None and second is not None else ""
        table.add_row(name, _number(first), _number(second), change)
    console.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _pairs(files: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {(digest or '')[:12]}" for name, digest in files.items())
