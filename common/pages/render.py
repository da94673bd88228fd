"""From a template to a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jinja2

HERE = Path(__file__).parent


def render(template: str, facts: dict[str, Any], folder: Path | None = None) -> str:
    """The text of a page.

    Args:
        template: its name; it extends `page.html`.
        facts: what it shows; texts in it are escaped.
        folder: of further templates.
    """
    folders = [HERE, *([folder] if folder is not None else [])]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment.get_template(template).render(facts)


def number(value: Any) -> str:
    """A number for people: 4 significant digits, thousands apart; anything else as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (math.isfinite(value) and value == round(value) and abs(value) >= 10_000):
        return f"{value:,.0f}"
    return f"{value:.4g}"
