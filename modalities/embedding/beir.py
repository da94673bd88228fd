"""Folders in the form of BEIR (arXiv:2104.08663): `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.data.rows import Row as SourceRow
from ...common.data.sources import rows
from ...common.errors import BadExample, DataError
from .roles import Columns
from .rows import Row

CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"


@dataclass(frozen=True, slots=True)
class Entry:
    """A query or a document."""

    text: str
    where: str
    fields: dict[str, Any]


def is_beir(path: str) -> bool:
    return all((Path(path) / name).is_file() for name in (CORPUS, QUERIES))


def items(path: str, split: str | None, label: str, number: int) -> Iterator[Row | BadExample]:
    """Each judged query with its documents and their grades; then, without a query, each document that is not judged.

    Queries that the split does not judge are left out. A judgement whose query or document is not there is a BadExample
    (`missing_id`) that names it.

    Args:
        path: the folder.
        split: name of a file in `qrels`; may be left out if there is only one.
        label: name of the data set in reports.
        number: of the data set.
    """
    folder = Path(path)
    judgements = _qrels(folder, split)
    corpus: dict[str, Entry] = {}
    queries: dict[str, Entry] = {}
    yield from _entries(folder / CORPUS, label, corpus)
    yield from _entries(folder / QUERIES, label, queries)
    judged: dict[str, dict[str, float]] = {}
    for row in rows(str(judgements), source=label):
        if isinstance(row, BadExample):
            yield row
            continue
        try:
            query, document, grade = _judgement(row, queries, corpus)
        except BadExample as error:
            yield error.with_traceback(None)
            continue
        judged.setdefault(query, {})[document] = grade
    for name, grades in judged.items():
        query_entry, texts = queries[name], tuple(corpus[document].text for document in grades)
        fields = {"source": label, **query_entry.fields}
        yield Row("groups", query_entry.text, texts, tuple(grades.values()), (), query_entry.where, number, fields)
    named = {document for grades in judged.values() for document in grades}
    for name, entry in corpus.items():
        if name not in named:
            yield Row("groups", None, (entry.text,), (0.0,), (), entry.where, number, {"source": label, **entry.fields})


def _qrels(folder: Path, split: str | None) -> Path:
    found = {file.stem: file for file in sorted((folder / QRELS).glob("*.tsv"))}
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split is not None and split in found:
        return found[split]
    problem = "several splits, and none is chosen" if split is None and found else "no such split"
    raise DataError(
        problem,
        where=folder / QRELS,
        given=split,
        expected=", ".join(found) or "a file such as test.tsv with the columns query-id, corpus-id, score",
        do="set `split` to one of these" if found else "add the file",
    )


def _entries(file: Path, label: str, found: dict[str, Entry]) -> Iterator[BadExample]:
    """Fills `found` by id; gives the rows that can't be used."""
    for row in rows(str(file), source=label):
        if isinstance(row, BadExample):
            yield row
            continue
        try:
            name, entry = _entry(row)
            if name in found:
                raise Columns({}, row.where).bad("duplicate_id", "an id is given twice", name, "ids that differ")
        except BadExample as error:
            yield error.with_traceback(None)
            continue
        found[name] = entry


def _entry(row: SourceRow) -> tuple[str, Entry]:
    """Id and text of a row; a document's title stands before its text."""
    columns = Columns(row.fields, row.where)
    missing = [name for name in ("_id", "text") if row.fields.get(name) is None]
    if missing:
        raise columns.bad("missing_column", f"the row has no {', '.join(missing)}", list(row.fields), "_id and text")
    parts = [columns.values.get("title") or "", columns.values["text"]]
    if not all(isinstance(part, str) for part in parts):
        raise columns.bad("not_text", "title or text is not a text", parts, "texts")
    whole = Columns({"text": " ".join(part for part in parts if part.strip())}, row.where)
    fields = {name: value for name, value in row.fields.items() if name not in ("_id", "title", "text")}
    return str(row.fields["_id"]), Entry(whole.text("text"), row.where, fields)


def _judgement(row: SourceRow, queries: dict[str, Entry], corpus: dict[str, Entry]) -> tuple[str, str, float]:
    columns, needed = Columns(row.fields, row.where), ("query-id", "corpus-id", "score")
    if any(row.fields.get(name) is None for name in needed):
        raise columns.bad("missing_column", "not a judgement", list(row.fields), ", ".join(needed))
    query, document = str(row.fields["query-id"]), str(row.fields["corpus-id"])
    missing = [name for name, known in ((query, queries), (document, corpus)) if name not in known]
    if missing:
        places = f"a query in {QUERIES} and a document in {CORPUS}"
        raise columns.bad("missing_id", "the judgement names what is not there", ", ".join(missing), places)
    return query, document, columns.number("score")
