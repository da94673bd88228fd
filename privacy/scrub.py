"""`luthier scrub`: a data set with typed placeholders where personal data and secrets were."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..common.console import progress
from ..common.data.rows import Cursor, Row
from ..common.data.sources import fingerprint, rows
from ..common.errors import BadExample, DataError
from ..common.record import write_json
from .find import ALL, find, folded
from .numbers import Numbers

EVERY = 1000
"""Rows between two commits."""
SAMPLES = 5
"""Samples of each kind in the report."""


@dataclass(frozen=True)
class Settings:
    """What is scrubbed, and how.

    Args:
        data: a file, a folder, or a data set on the hub.
        output: JSONL file to write; the report stands beside it, as `OUTPUT.report.json`.
        split: of the data.
        kinds: names of the kinds that are looked for.
        fields: fields of the rows that are looked through; empty: all.
        languages: in which names are looked for too, by Presidio.
    """

    data: str
    output: Path
    split: str | None = None
    kinds: tuple[str, ...] = ALL
    fields: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()


@dataclass
class Report:
    """What was found.

    Args:
        rows: rows read.
        changed: rows in which something was found.
        unreadable: rows left out, as they can't be read.
        found: how often each kind was found.
        distinct: how many different values of each kind there are.
        fields: how often something was found in each field.
        samples: place and form of the first of each kind; letters are `a` and digits `0`, so no value is in it.
    """

    rows: int = 0
    changed: int = 0
    unreadable: int = 0
    found: dict[str, int] = field(default_factory=dict)
    distinct: dict[str, int] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def add(self, kind: str, value: str, place: str, where: str) -> None:
        place_of_all = re.sub(r"\[\d+\]", "[]", place)
        self.found[kind] = self.found.get(kind, 0) + 1
        self.fields[place_of_all] = self.fields.get(place_of_all, 0) + 1
        samples = self.samples.setdefault(kind, [])
        if len(samples) < SAMPLES:
            samples.append({"where": where, "field": place, "form": form(value)})


def form(value: str) -> str:
    """What a value looks like, without any of its letters and digits: `a` for each letter, `0` for each digit."""
    masked = "".join("0" if one.isdigit() else "a" if one.isalpha() else one for one in value[:40])
    return f"{masked}... ({len(value)} characters)" if len(value) > 40 else masked


def scrub(settings: Settings, after_rows: Callable[[int], None] | None = None) -> Report:
    """Scrub a data set; a killed run goes on where it was committed last.

    Args:
        after_rows: called with the number of rows after each commit.

    Raises:
        DataError: no such data, an output that is there already, or one that is no JSONL file.
    """
    output = settings.output
    if output.suffix != ".jsonl":
        raise DataError("the output is a JSONL file", where=output, do="name it .jsonl; every recipe reads that")
    if output.exists():
        raise DataError("the file exists already and is not overwritten", where=output, do="give another name")
    part = output.with_name(f".{output.name}.part")
    kept = {**asdict(settings), "output": str(output), "sha256": fingerprint(settings.data)}
    output.parent.mkdir(parents=True, exist_ok=True)
    numbers = Numbers(output.with_name(f".{output.name}.numbers"), kept)
    state = numbers.state() or {"bytes": 0, "place": None, "report": asdict(Report())}
    report, cursor = Report(**state["report"]), Cursor(state["place"])
    begun, skip = state["place"] is not None, report.rows + report.unreadable
    with part.open("r+b" if part.exists() else "w+b") as file, progress("scrubbing", "rows") as show:
        file.truncate(state["bytes"])
        file.seek(state["bytes"])
        for number, item in enumerate(rows(settings.data, split=settings.split, cursor=cursor), skip if begun else 0):
            if number < skip:  # a format in which a reader can't begin elsewhere
                continue
            if isinstance(item, BadExample):
                report.unreadable += 1
            else:
                line = json.dumps(_row(item, settings, numbers, report), ensure_ascii=False)
                file.write(line.encode("utf-8", "replace") + b"\n")
            if (number + 1) % EVERY == 0:
                _commit(file, numbers, cursor, report)
                show(number + 1, None)
                if after_rows:
                    after_rows(number + 1)
        _commit(file, numbers, cursor, report)
    report.distinct = numbers.distinct()
    write_json(output.with_name(f"{output.name}.report.json"), {"data": settings.data, **asdict(report)})
    part.replace(output)
    numbers.forget()
    return report


def _commit(file: Any, numbers: Numbers, cursor: Cursor, report: Report) -> None:
    file.flush()
    os.fsync(file.fileno())
    numbers.commit({"bytes": file.tell(), "place": cursor.place, "report": asdict(report)})


def _row(row: Row, settings: Settings, numbers: Numbers, report: Report) -> dict[str, Any]:
    report.rows += 1
    before = sum(report.found.values())

    def text(value: str, place: str) -> str:
        return scrubbed(value, numbers, settings.kinds, settings.languages, lambda kind, found: report.add(
            kind, found, place, row.where
        ))  # fmt: skip

    wanted = settings.fields
    made = {
        name: _walk(value, str(name), text) if not wanted or name in wanted else value
        for name, value in row.fields.items()
    }
    report.changed += sum(report.found.values()) > before
    return {name: _plain(value) for name, value in made.items()}


def scrubbed(
    text: str,
    numbers: Numbers,
    kinds: Sequence[str] = ALL,
    languages: Sequence[str] = (),
    told: Callable[[str, str], None] = lambda kind, value: None,
) -> str:
    """A text with placeholders such as `<EMAIL_1>`.

    Args:
        numbers: which value has which number.
        told: called with the kind and the value of each that is replaced.
    """
    parts, done = [], 0
    for one in find(text, kinds, languages):
        value = text[one.begin : one.end]
        told(one.kind, value)
        parts += [text[done : one.begin], f"<{one.kind}_{numbers.of(one.kind, _same(one.kind, value))}>"]
        done = one.end
    return "".join([*parts, text[done:]])


def _same(kind: str, value: str) -> str:
    """What is the same for two ways of writing one value: spaces, hyphens and case say nothing in numbers."""
    if kind in ("PHONE", "CARD", "IBAN", "US_SSN", "UK_NINO", "FR_NIR", "DE_TAX_ID", "IT_FISCAL_CODE", "CN_ID"):
        return re.sub(r"[^A-Z0-9+]", "", folded(value).upper())
    if kind == "EMAIL":
        return re.sub(r" ?[(\[]dot[)\]] ?", ".", re.sub(r" ?[(\[]at[)\]] ?", "@", value.lower()))
    return value.lower().replace("[.]", ".") if kind == "IP" else value


def _walk(value: Any, place: str, text: Callable[[str, str], str]) -> Any:
    """A value with all texts in it replaced, also those in lists and mappings."""
    if isinstance(value, str):
        return text(value, place)
    if isinstance(value, Mapping):
        return {name: _walk(one, f"{place}.{name}", text) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(one, f"{place}[{at}]", text) for at, one in enumerate(value)]
    return value


def _plain(value: Any) -> Any:
    """A value as JSON has it; media that a table holds can't be written into JSONL."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value
