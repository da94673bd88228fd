"""Data sources: whatever the format, a stream of rows, each with the place it came from.

Readable are JSONL, JSON, CSV, TSV, Parquet and Arrow files, folders with a `metadata` file, folders written by
`datasets.save_to_disk`, and what `datasets.load_dataset` understands: folders of data files, names on the hub.
Nothing in a source is executed.
"""

from __future__ import annotations

import csv
import difflib
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadExample, DataError
from .rows import Row

Item = Row | BadExample
_Record = tuple[str, list[str] | BadExample]  # where a row of a CSV or TSV begins, and its cells

_BATCH = 1000
_NOT_UTF8 = re.compile(r"[\udc80-\udcff]")  # what `surrogateescape` makes of bytes that are not UTF-8
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_KALDI = ("wav.scp", "text", "segments", "utt2spk")


@dataclass(frozen=True, slots=True)
class Media:
    """A clip or an image held inside a data set; calling it gives its encoded bytes. Can be pickled.

    Args:
        dataset: a `datasets.Dataset` with this one column, in Arrow format.
        index: row in the data set, from 0.
        column: the column's name.
        path: file name that the data set gives; only a name, the bytes are in the data set.
    """

    dataset: Any = field(repr=False)
    index: int
    column: str
    path: str | None = None

    def __call__(self) -> bytes:
        value = self.dataset[self.index].column(self.column)[0].as_py()
        return bytes(value["bytes"] if isinstance(value, dict) else value)


def rows(path: str, *, split: str | None = None, source: str = "") -> Iterator[Item]:
    """All rows of a source in its own order; a row that can't be read is a BadExample (`unreadable_row`) in its place.

    Every line that is not blank and every record of a table gives exactly one item, so counts add up. `where` is
    `file.jsonl:17` (line, from 1) for text formats, `file.parquet#5` (row, from 0) for JSON arrays and tables. In
    a CSV a quoted value may span lines; in a TSV a line is a row, and quotes that enclose no value belong to it.

    A column of audio or images is not decoded: its value is a `Media` if the bytes are inside the data set, the
    path as a string if only that is there, else None. A Parquet or Arrow file with such a column is converted once
    into the cache of `datasets`, where single clips can be read; other tables are streamed.

    Args:
        path: a file, a folder, or the name of a data set on the hub.
        split: split of a folder or a hub data set; may be left out if there is only one.
        source: name of the data set in the recipe.

    Raises:
        DataError: at once for a source, format or split that is not there; while reading for a table that is
            broken as a whole, and for a source without any row.
    """
    place = Path(path)
    if place.is_file():
        items = _file_rows(place, split, source)
    elif place.is_dir():
        items = _folder_rows(place, split, source)
    elif _may_be_hub_name(path):
        items = _dataset_rows(_load(path, split), path, Path(), source)
    else:
        raise _missing(path)
    return _not_empty(items, path)


def fingerprint(path: str) -> str:
    """SHA-256 (hex) of a source's bytes; the same data gives the same value in any folder.

    A folder's is taken over the sorted names and hashes of its data and metadata files, not of the clips or images
    that they name; if it has none, over the names and sizes of all its files. A hub data set's is taken over its
    cached tables.

    Raises:
        DataError: no such source.
    """
    place = Path(path)
    if place.is_file():
        return _sha(place)
    if place.is_dir():
        files = [(item.relative_to(place).as_posix(), item) for item in place.rglob("*") if item.is_file()]
        marks = [(name, _sha(item)) for name, item in files if _is_data(item)]
        marks = marks or [(name, str(item.stat().st_size)) for name, item in files]
    elif _may_be_hub_name(path):
        tables = [Path(item["filename"]) for part in _fetch(path, None).values() for item in part.cache_files]
        marks = [(item.name, _sha(item)) for item in tables]
    else:
        raise _missing(path)
    return hashlib.sha256(json.dumps(sorted(marks)).encode()).hexdigest()


def _sha(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_data(path: Path) -> bool:
    """Whether a folder's file is data or metadata; the caches that `datasets` leaves beside them are neither."""
    return (path.suffix.lower() in _READERS or path.name in _KALDI) and not path.name.startswith(("cache-", "."))


def _may_be_hub_name(path: str) -> bool:
    """`name` or `owner/name`, and not what looks like a file or lies in a folder that is here."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path) is not None
    is_file = Path(path).suffix.lower() in _READERS or ("/" in path and Path(path).parent.is_dir())
    return is_name and not is_file


def _missing(path: str, problem: str = "no such file or folder") -> DataError:
    folder, name = Path(path).parent, Path(path).name
    near = difflib.get_close_matches(name, sorted(os.listdir(folder)), n=1) if folder.is_dir() else []
    given = name if folder.is_dir() else f"{name} in {folder}, which is no folder"
    expected = f"{near[0]}, the nearest name there" if near else "a file, a folder, or a data set on the hub"
    return DataError(problem, where=path, given=given, expected=expected, do="correct the path")


def _not_empty(items: Iterator[Item], path: str) -> Iterator[Item]:
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if is_empty:
        raise DataError("the source holds no rows", where=path, expected="one row or more", do="check how it was made")


def _file_rows(path: Path, split: str | None, source: str) -> Iterator[Item]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known, do = ", ".join(_READERS), "convert the file, or correct its extension"
        raise DataError("not a readable format", where=path, given=path.suffix or "no extension", expected=known, do=do)
    if split is not None:
        raise DataError("a file has no splits", where=path, given=f"split {split!r}", do="leave `split` out")
    return reader(path, source)


def _unreadable(where: str, problem: str, given: object, expected: str) -> BadExample:
    shown = repr(given)  # also shows bytes that are not UTF-8 so that any terminal can print them
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return BadExample("unreadable_row", problem, where=where, given=shown, expected=expected, do="correct the row")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(where, line) for each line that is not blank; bytes that are not UTF-8 become lone surrogates."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip(" \r\n"):
                yield f"{path.name}:{number}", line.rstrip("\r\n")


def _json_lines(path: Path, source: str) -> Iterator[Item]:
    for where, line in _lines(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield _unreadable(where, f"the line is not valid JSON: {error}", line, "one JSON object")
            continue
        if _NOT_UTF8.search(line):
            yield _unreadable(where, "the line is not UTF-8", line, "text in UTF-8")
        else:
            yield _object(value, where, path, source)


def _json(path: Path, source: str) -> Iterator[Item]:
    """An array of objects, or one object per line."""
    _, first = next(_lines(path), ("", ""))
    if not first.lstrip().startswith("["):
        return _json_lines(path, source)
    try:
        array = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"not valid JSON: {error}", where=path, expected="an array of objects", do="correct it"
        ) from error
    return (_object(item, f"{path.name}#{index}", path, source) for index, item in enumerate(array))


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
                cells = next(reader, None)
            except csv.Error as error:
                given = f"lines {first} to {reader.line_num}"
                yield where, _unreadable(where, f"not valid CSV: {error}", given, "quotes closed, inner quotes doubled")
                continue
            if cells is None:
                return
            if len(cells) > 1 or "".join(cells).strip():
                yield where, cells


def _tsv(path: Path) -> Iterator[_Record]:
    for where, line in _lines(path):
        try:
            yield where, next(csv.reader([line], delimiter="\t", strict=True))
        except csv.Error:
            yield where, line.split("\t")


def _cells(path: Path, source: str) -> Iterator[Item]:
    records = _tsv(path) if path.suffix.lower() == ".tsv" else _csv(path)
    where, header = next(records, ("", []))
    names = [name.strip() for name in header] if isinstance(header, list) else ["", ""]
    if len(set(names)) < len(names) or _NOT_UTF8.search("".join(names)):
        expected = "distinct column names in UTF-8, such as audio,text"
        raise DataError("not a header", where=where, given=repr(header), expected=expected, do="correct the first line")
    for where, cells in records:
        if isinstance(cells, BadExample):
            yield cells
        elif len(cells) != len(names):
            yield _unreadable(where, f"the row has {len(cells)} values", cells, f"{len(names)}, one for each column")
        elif _NOT_UTF8.search("".join(cells)):
            yield _unreadable(where, "the row is not UTF-8", cells, "text in UTF-8")
        else:
            yield Row(dict(zip(names, cells, strict=True)), where, path.parent, source)


def _table(path: Path, source: str) -> Iterator[Item]:
    import pyarrow as pa  # type: ignore[import-untyped]

    try:
        schema, batches = _open_table(path)
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, error) from error
    if not _media_columns(schema):
        return _table_rows(batches, path.name, path.parent, source, {})
    kind = "parquet" if path.suffix.lower() == ".parquet" else "arrow"
    return _dataset_rows(_load(kind, "train", data_files=glob.escape(str(path))), path.name, path.parent, source)


def _open_table(path: Path) -> tuple[Any, Iterable[Any]]:
    """Schema and record batches."""
    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix.lower() == ".parquet":
        file = parquet.ParquetFile(path)
        return file.schema_arrow, file.iter_batches(_BATCH)
    data = pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(data)
        return stream.schema, stream
    except pa.ArrowInvalid:  # the other of the two layouts
        table = pa.ipc.open_file(data)
        return table.schema, (table.get_batch(index) for index in range(table.num_record_batches))


def _broken(where: object, error: Exception) -> DataError:
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the outer ones say only that something failed
    return DataError(f"can't be read: {error}", where=where, expected="a readable data set", do="check how it was made")


def _table_rows(
    tables: Iterable[Any], label: str, base: Path, source: str, stores: Mapping[str, Any]
) -> Iterator[Item]:
    import pyarrow as pa

    index = 0
    try:
        for table in tables:
            for begin in range(0, table.num_rows, _BATCH):  # an Arrow file may be one huge batch
                part = table.slice(begin, _BATCH)
                columns = {name: _values(part.column(name), name, stores, index) for name in part.schema.names}
                for values in zip(*columns.values(), strict=True):
                    yield Row(dict(zip(columns, values, strict=True)), f"{label}#{index}", base, source)
                    index += 1
    except (pa.ArrowException, OSError) as error:
        raise _broken(f"{label}#{index}", error) from error


def _media_columns(schema: Any) -> list[str]:
    return [item.name for item in schema if _is_media(item.type)]


def _is_media(kind: Any) -> bool:
    """Whether a column holds encoded files: bytes, or a struct with `bytes` as `datasets.Audio` and `Image` have it."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(item.name == "bytes" and _is_media(item.type) for item in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _values(column: Any, name: str, stores: Mapping[str, Any], first: int) -> list[Any]:
    """A column's values; media stay where they are and are only referred to."""
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    if name not in stores:
        return list(column.to_pylist())
    fields = [item.name for item in column.type] if hasattr(column.type, "fields") else []
    held = pc.struct_field(column, "bytes") if fields else column
    paths = pc.struct_field(column, "path").to_pylist() if "path" in fields else [None] * len(column)
    marks = enumerate(zip(held.is_valid().to_pylist(), paths, strict=True), first)
    return [Media(stores[name], index, name, path) if is_held else path for index, (is_held, path) in marks]


def _dataset_rows(dataset: Any, label: str, base: Path, source: str) -> Iterator[Item]:
    view = dataset.with_format("arrow")  # in this format nothing is decoded
    stores = {name: view.select_columns([name]) for name in _media_columns(view.features.arrow_schema)}
    return _table_rows(view.iter(batch_size=_BATCH), label, base, source, stores)


def _folder_rows(folder: Path, split: str | None, source: str) -> Iterator[Item]:
    found = _metadata(folder / split) if split else _metadata(folder)
    if found is not None:
        return _file_rows(found, None, source)
    inner = {item.name: file for item in sorted(folder.iterdir()) if item.is_dir() and (file := _metadata(item))}
    if inner and split is None:
        return _file_rows(_choose(inner, split, str(folder)), None, source)
    return _dataset_rows(_load(str(folder), split), folder.resolve().name, folder, source)


def _metadata(folder: Path) -> Path | None:
    return next((folder / name for name in _METADATA if (folder / name).is_file()), None)


def _choose(splits: Mapping[str, Any], split: str | None, where: str) -> Any:
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split is not None and split in splits:
        return splits[split]
    problem = "several splits, and none is chosen" if split is None else "no such split"
    raise DataError(problem, where=where, given=split, expected=", ".join(splits), do="set `split` to one of these")


def _load(name: str, split: str | None, **options: Any) -> Any:
    loaded = _fetch(name, split, **options)
    return _choose(loaded, split, name) if isinstance(loaded, dict) else loaded


def _fetch(name: str, split: str | None, **options: Any) -> Any:
    """A `datasets.Dataset`, or several by split."""
    import datasets  # type: ignore[import-untyped]

    datasets.disable_progress_bars()
    try:
        if any((Path(name) / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(name)
            return saved if isinstance(saved, dict) else {str(saved.split or "all"): saved}
        return datasets.load_dataset(name, split=split, **options)
    except Exception as error:  # which ones `datasets` raises depends on the format
        is_here = Path(name).exists() or "data_files" in options
        raise (_broken(name, error) if is_here else _missing(name, f"not here and not on the hub: {error}")) from error


_READERS: dict[str, Callable[[Path, str], Iterator[Item]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _cells,
    ".tsv": _cells,
    ".parquet": _table,
    ".arrow": _table,
}
