"""`luthier scrub`: a data set with typed placeholders where personal data and secrets were.

Looked through are texts, names of fields, and what has no form in JSON; numbers and truth values stay as they are.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..common.console import progress
from ..common.data.rows import Cursor, Row
from ..common.data.sources import fingerprint, rows
from ..common.errors import BadExample, DataError
from ..common.record import write_json
from .find import ALL, find, folded
from .names import model_of
from .numbers import Numbers
from .secrets import SECRETS

EVERY = 1000
"""Rows between two commits."""
HIDDEN = frozenset({"PRIVATE_KEY", "JWT", "SECRET", *SECRETS})
"""Kinds of which the report tells only the length: what stands between their letters is part of the secret."""
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
        models: what found names, by language.
    """

    rows: int = 0
    changed: int = 0
    unreadable: int = 0
    found: dict[str, int] = field(default_factory=dict)
    distinct: dict[str, int] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, value: str, place: str, where: str) -> None:
        place_of_all = re.sub(r"\[\d+\]", "[]", place)
        self.found[kind] = self.found.get(kind, 0) + 1
        self.fields[place_of_all] = self.fields.get(place_of_all, 0) + 1
        samples = self.samples.setdefault(kind, [])
        if len(samples) < SAMPLES:
            shown = f"{len(value)} characters" if kind in HIDDEN else form(value)
            samples.append({"where": where, "field": place, "form": shown})


def form(value: str) -> str:
    """What a value looks like, without any of its letters and digits: `a` for each letter, `0` for each digit."""
    masked = "".join(_MASKS.get(unicodedata.category(one)[0], one) for one in value[:40])
    return f"{masked}... ({len(value)} characters)" if len(value) > 40 else masked


_MASKS = {"L": "a", "M": "a", "N": "0"}
"""Letters, the marks that some scripts write vowels with, and numbers, by Unicode's categories."""


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
    models = {language: model_of(language) for language in settings.languages}
    kept = {**asdict(settings), "output": str(output), "sha256": fingerprint(settings.data), "models": models}
    output.parent.mkdir(parents=True, exist_ok=True)
    numbers = Numbers(output.with_name(f".{output.name}.numbers"), kept)
    state = numbers.state() or {"bytes": 0, "place": None, "report": asdict(Report(models=models))}
    report, cursor = Report(**state["report"]), Cursor(state["place"])
    begun, skip = state["place"] is not None, report.rows + report.unreadable
    opened = part.open("r+b" if part.exists() else "w+b")
    with closing(numbers), opened as file, progress("scrubbing", "rows") as show:
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
    numbers.forget()  # first: once the output is whole, no run comes here again
    part.replace(output)
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

    made = _walk(row.fields, "", text, settings.fields)
    report.changed += sum(report.found.values()) > before
    return dict(made)


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


def _walk(value: Any, place: str, text: Callable[[str, str], str], wanted: Sequence[str] = ()) -> Any:
    """A value as JSON has it, with all texts replaced, also those in lists and mappings and the mappings' names.

    Args:
        place: of the value in its row.
        text: what to make of a text, by its place.
        wanted: names to look through; empty: all.
    """
    if isinstance(value, Mapping):
        made: dict[str, Any] = {}
        for key, one in value.items():
            chosen = text if not wanted or key in wanted else _as_it_is
            name = str(key)
            if _holds_values(name):
                name = chosen(name, f"{place}.(name)" if place else "(name)")
            while name in made:  # two ways of writing one value
                name += "'"
            made[name] = _walk(one, f"{place}.{name}" if place else name, chosen)
        return made
    if isinstance(value, list | tuple):
        return [_walk(one, f"{place}[{at}]", text) for at, one in enumerate(value)]
    if value is None or isinstance(value, bool | int | float):
        return value
    return text(str(value), place)  # such as dates; media that a table holds can't be written into JSONL


@lru_cache(10_000)
def _holds_values(name: str) -> bool:
    """Whether a field's name is more than that, as in a table whose first row was no header."""
    return bool(find(name))


def _as_it_is(value: str, place: str) -> str:
    return value
