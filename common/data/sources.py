"""Data sources: whatever the format, a stream of rows, each with the place it came from.

Readable are JSONL, JSON, CSV, TSV, Parquet and Arrow files, folders with a `metadata` file, folders written by
`datasets.save_to_disk`, and what `datasets.load_dataset` understands: folders of data files, names on the hub.
Nothing in a source is executed.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import DataError
from .rows import Cursor, Row
from .text_files import Item, cells, json_file, json_lines

_BATCH = 1000
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


def rows(path: str, *, split: str | None = None, source: str = "", cursor: Cursor | None = None) -> Iterator[Item]:
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
        cursor: where to begin; it then follows the rows given, but in JSON arrays, CSV and TSV files. With it, what
            `datasets` reads is read as it goes, without a copy in its cache; there media are `{bytes, path}`.

    Raises:
        DataError: at once for a source, format or split that is not there; while reading for a table that is
            broken as a whole, and for a source without any row.
    """
    place = Path(path)
    at = cursor or Cursor()
    is_begun = at.place is not None
    if place.is_file():
        items = _file_rows(place, split, source, at)
    elif place.is_dir():
        items = _folder_rows(place, split, source, at, cursor is not None)
    elif _may_be_hub_name(path):
        items = _loaded_rows(path, split, path, Path(), source, at, cursor is not None)
    else:
        raise _missing(path)
    return items if is_begun else _not_empty(items, path)


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


def _file_rows(path: Path, split: str | None, source: str, cursor: Cursor) -> Iterator[Item]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known, do = ", ".join(_READERS), "convert the file, or correct its extension"
        raise DataError("not a readable format", where=path, given=path.suffix or "no extension", expected=known, do=do)
    if split is not None:
        raise DataError("a file has no splits", where=path, given=f"split {split!r}", do="leave `split` out")
    return reader(path, source, cursor)


def _table(path: Path, source: str, cursor: Cursor) -> Iterator[Item]:
    import pyarrow as pa

    try:
        schema, batches, first = _open_table(path, cursor.place or 0)
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, error) from error
    if not _media_columns(schema):
        return _table_rows(batches, first, path.name, path.parent, source, cursor)
    kind = "parquet" if path.suffix.lower() == ".parquet" else "arrow"
    dataset = _load(kind, "train", data_files=glob.escape(str(path)))
    return _dataset_rows(dataset, path.name, path.parent, source, cursor)


def _open_table(path: Path, begin: int) -> tuple[Any, Iterable[Any], int]:
    """Schema, record batches, and the number of their first row, which is `begin` or before."""
    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix.lower() == ".parquet":
        file = parquet.ParquetFile(path)
        group = first = 0
        while group < file.num_row_groups - 1 and first + (size := file.metadata.row_group(group).num_rows) <= begin:
            group, first = group + 1, first + size
        return file.schema_arrow, file.iter_batches(_BATCH, range(group, file.num_row_groups)), first
    data = pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(data)
        return stream.schema, stream, 0
    except pa.ArrowInvalid:  # the other of the two layouts
        table = pa.ipc.open_file(data)
        return table.schema, (table.get_batch(index) for index in range(table.num_record_batches)), 0


def _broken(where: object, error: Exception) -> DataError:
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the outer ones say only that something failed
    return DataError(f"can't be read: {error}", where=where, expected="a readable data set", do="check how it was made")


def _table_rows(
    tables: Iterable[Any],
    first: int,
    label: str,
    base: Path,
    source: str,
    cursor: Cursor,
    stores: Mapping[str, Any] | None = None,
) -> Iterator[Item]:
    """The rows from the cursor on; `first` is the number of the tables' first row, `stores` has the media columns."""
    import pyarrow as pa

    index, begin = first, cursor.place or 0
    try:
        for table in tables:
            for at in range(0, table.num_rows, _BATCH):  # an Arrow file may be one huge batch
                part = table.slice(at, _BATCH)
                done = min(max(begin - index, 0), part.num_rows)
                part, index = part.slice(done), index + done
                columns = {name: _values(part.column(name), name, stores or {}, index) for name in part.schema.names}
                for values in zip(*columns.values(), strict=True):
                    cursor.place = index = index + 1
                    yield Row(dict(zip(columns, values, strict=True)), f"{label}#{index - 1}", base, source)
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
    import pyarrow.compute as pc

    if name not in stores:
        return list(column.to_pylist())
    fields = [item.name for item in column.type] if hasattr(column.type, "fields") else []
    held = pc.struct_field(column, "bytes") if fields else column
    paths = pc.struct_field(column, "path").to_pylist() if "path" in fields else [None] * len(column)
    marks = enumerate(zip(held.is_valid().to_pylist(), paths, strict=True), first)
    return [Media(stores[name], index, name, path) if is_held else path for index, (is_held, path) in marks]


def _dataset_rows(dataset: Any, label: str, base: Path, source: str, cursor: Cursor) -> Iterator[Item]:
    view = dataset.with_format("arrow")  # in this format nothing is decoded
    stores = {name: view.select_columns([name]) for name in _media_columns(view.features.arrow_schema)}
    begin = cursor.place or 0
    tables = view.select(range(begin, len(view))).iter(_BATCH) if begin < len(view) else ()
    return _table_rows(tables, begin, label, base, source, cursor, stores)


def _loaded_rows(
    name: str, split: str | None, label: str, base: Path, source: str, cursor: Cursor, streamed: bool
) -> Iterator[Item]:
    """What `datasets` reads: from a copy in its cache, or as it goes."""
    dataset = _load(name, split, **({"streaming": True} if streamed else {}))
    if hasattr(dataset, "load_state_dict"):
        return _streamed_rows(dataset, label, base, source, cursor)
    return _dataset_rows(dataset, label, base, source, cursor)


def _streamed_rows(dataset: Any, label: str, base: Path, source: str, cursor: Cursor) -> Iterator[Item]:
    """Rows of a `datasets.IterableDataset`. A place is a state of it as JSON, rows since then, rows in all."""
    state, since, index = cursor.place or ("", 0, 0)
    if dataset.features:
        dataset = dataset.decode(False)
    if state:
        dataset.load_state_dict(json.loads(state))
    found = islice(dataset, since, None)
    while True:
        try:
            fields = next(found, None)
            since, index = since + 1, index + 1
            if since == _BATCH:
                state, since = json.dumps(dataset.state_dict()), 0
        except Exception as error:  # which ones `datasets` raises depends on the format and on where it reads
            raise _broken(f"{label}#{index}", error) from error
        if fields is None:
            return
        cursor.place = [state, since, index]
        yield Row(fields, f"{label}#{index - 1}", base, source)


def _folder_rows(folder: Path, split: str | None, source: str, cursor: Cursor, streamed: bool) -> Iterator[Item]:
    found = _metadata(folder / split) if split else _metadata(folder)
    if found is not None:
        return _file_rows(found, None, source, cursor)
    inner = {item.name: file for item in sorted(folder.iterdir()) if item.is_dir() and (file := _metadata(item))}
    if inner and split is None:
        return _file_rows(_choose(inner, split, str(folder)), None, source, cursor)
    return _loaded_rows(str(folder), split, folder.resolve().name, folder, source, cursor, streamed)


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


_READERS: dict[str, Callable[[Path, str, Cursor], Iterator[Item]]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_file,
    ".csv": cells,
    ".tsv": cells,
    ".parquet": _table,
    ".arrow": _table,
}
