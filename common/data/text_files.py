"""Rows of JSONL, JSON, CSV and TSV files, one after the other."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import BadExample, DataError
from .rows import Cursor, Row

Item = Row | BadExample
_Record = tuple[str, list[str] | BadExample]  # where a row of a CSV or TSV begins, and its cells

_NOT_UTF8 = re.compile(r"[\udc80-\udcff]")  # what `surrogateescape` makes of bytes that are not UTF-8


def json_lines(path: Path, source: str, cursor: Cursor) -> Iterator[Item]:
    """One object on each line; a reader can begin at any of them."""
    for where, line in _lines(path, cursor):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield _unreadable(where, f"the line is not valid JSON: {error}", line, "one JSON object")
            continue
        if _NOT_UTF8.search(line):
            yield _unreadable(where, "the line is not UTF-8", line, "text in UTF-8")
        else:
            yield _object(value, where, path, source)


def json_file(path: Path, source: str, cursor: Cursor) -> Iterator[Item]:
    """An array of objects, which is read as a whole, or one object per line."""
    _, first = next(_lines(path, Cursor()), ("", ""))
    if not first.lstrip().startswith("["):
        return json_lines(path, source, cursor)
    try:
        array = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"not valid JSON: {error}", where=path, expected="an array of objects", do="correct it"
        ) from error
    return (_object(item, f"{path.name}#{index}", path, source) for index, item in enumerate(array))


def cells(path: Path, source: str, cursor: Cursor) -> Iterator[Item]:
    """A line of names, then one row for each record; a reader can't begin in the middle."""
    records = _tsv(path) if path.suffix.lower() == ".tsv" else _csv(path)
    where, header = next(records, ("", []))
    names = [name.strip() for name in header] if isinstance(header, list) else ["", ""]
    if len(set(names)) < len(names) or _NOT_UTF8.search("".join(names)):
        expected = "distinct column names in UTF-8, such as audio,text"
        raise DataError("not a header", where=where, given=repr(header), expected=expected, do="correct the first line")
    for where, values in records:
        if isinstance(values, BadExample):
            yield values
        elif len(values) != len(names):
            yield _unreadable(where, f"the row has {len(values)} values", values, f"{len(names)}, one for each column")
        elif _NOT_UTF8.search("".join(values)):
            yield _unreadable(where, "the row is not UTF-8", values, "text in UTF-8")
        else:
            yield Row(dict(zip(names, values, strict=True)), where, path.parent, source)


def _lines(path: Path, cursor: Cursor) -> Iterator[tuple[str, str]]:
    """(where, line) for each line that is not blank; bytes that are not UTF-8 become lone surrogates. The place of
    a cursor is the number of lines and of bytes before it."""
    number, begin = cursor.place or (0, 0)
    with path.open("rb") as file:
        file.seek(begin)
        for raw in file:
            number, begin = number + 1, begin + len(raw)
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")
            if line.strip(" \r\n"):
                cursor.place = [number, begin]
                yield f"{path.name}:{number}", line.rstrip("\r\n")


def _unreadable(where: str, problem: str, given: object, expected: str) -> BadExample:
    shown = repr(given)  # also shows bytes that are not UTF-8 so that any terminal can print them
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return BadExample("unreadable_row", problem, where=where, given=shown, expected=expected, do="correct the row")


def _object(value: Any, where: str, path: Path, source: str) -> Item:
    if isinstance(value, dict):
        return Row(value, where, path.parent, source)
    return _unreadable(where, "the row is not an object", value, 'an object, as in {"text": "..."}')


def _csv(path: Path) -> Iterator[_Record]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)  # strict: an open quote is an error, not one row with all that follows
        while True:
            first = reader.line_num + 1
            where = f"{path.name}:{first}"
            try:
                values = next(reader, None)
            except csv.Error as error:
                given = f"lines {first} to {reader.line_num}"
                yield where, _unreadable(where, f"not valid CSV: {error}", given, "quotes closed, inner quotes doubled")
                continue
            if values is None:
                return
            if len(values) > 1 or "".join(values).strip():
                yield where, values


def _tsv(path: Path) -> Iterator[_Record]:
    for where, line in _lines(path, Cursor()):
        try:
            yield where, next(csv.reader([line], delimiter="\t", strict=True))
        except csv.Error:
            yield where, line.split("\t")
