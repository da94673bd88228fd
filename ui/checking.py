"""What a check has found so far, as a table."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from .jobs import Jobs
from .place import Place

CHECK = "/check"
"""Name of the job that checks a recipe; no run's name begins with a slash."""
_SIGNS = {"pass": "✓", "fail": "✗", "n/a": "–"}


def start(place: Place, jobs: Jobs, recipe: str) -> None:
    """Check a recipe of the folder. Raises LuthierError if one is being checked already."""
    jobs.start(CHECK, ["check", f"./{recipe}", "--fast", "--json", place.argument(_file(place))])
    _file(place).unlink(missing_ok=True)  # the answers of the one before; these come at its end


def shown(place: Place, jobs: Jobs) -> str:
    """The answers as HTML; while there are none, the end of what the check has printed."""
    if jobs.is_running(CHECK):
        return "<p>checking ...</p>"
    try:
        found = json.loads(_file(place).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        printed = jobs.tail(CHECK)
        return f"<div class='answers'><pre>{escape(printed)}</pre></div>" if printed else ""
    rows = "".join(_question(one) for one in found["questions"])
    verdict = "passed" if found["passed"] else "not passed"
    return f"<div class='answers'><p><b>{verdict}</b></p><table>{rows}</table></div>"


def _question(one: dict[str, Any]) -> str:
    head = f"<tr><th colspan='3'>{escape(one['question'])}: {escape(one['asks'])}</th></tr>"
    return head + "".join(_answer(answer) for answer in one["answers"])


def _answer(answer: dict[str, Any]) -> str:
    do = f"<div class='do'>do: {escape(answer['do'])}</div>" if answer["do"] else ""
    state = escape(answer["state"])
    return (
        f"<tr><td>{escape(answer['name'])}</td><td class='{state}'>{_SIGNS[answer['state']]} {state}</td>"
        f"<td>{escape(answer['found'])}{do}</td></tr>"
    )


def _file(place: Place) -> Path:
    return place.own / "check.json"
