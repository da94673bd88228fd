"""Each readable format: what goes in comes out, with its place; what can't be read is named, never dropped."""

from __future__ import annotations

import csv
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from luthier.common.data.rows import Row
from luthier.common.data.sources import Media, fingerprint, rows
from luthier.common.errors import BadExample, DataError

RECORDS: list[dict[str, Any]] = [
    {"audio": "a.wav", "text": "perché no", "n": "1"},
    {"audio": "b.wav", "text": "你好, мир 🎻", "n": "2"},
    {"audio": "c.wav", "text": 'he said "hi"', "n": "3"},
]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in records), encoding="utf-8")


def write_array(path: Path, records: list[Any]) -> None:
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")


def write_cells(path: Path, records: list[dict[str, Any]], encoding: str = "utf-8") -> None:
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(records)


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=2)


def write_arrow_stream(path: Path, records: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow_file(path: Path, records: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def good(items: Iterator[Row | BadExample]) -> list[Row]:
    found = list(items)
    assert all(isinstance(item, Row) for item in found), found
    return [item for item in found if isinstance(item, Row)]


def bad(items: Iterator[Row | BadExample]) -> list[BadExample]:
    return [item for item in items if isinstance(item, BadExample)]


FORMATS = {
    "d.jsonl": (write_lines, ["d.jsonl:1", "d.jsonl:2", "d.jsonl:3"]),
    "d.ndjson": (write_lines, ["d.ndjson:1", "d.ndjson:2", "d.ndjson:3"]),
    "lines.json": (write_lines, ["lines.json:1", "lines.json:2", "lines.json:3"]),
    "array.json": (write_array, ["array.json#0", "array.json#1", "array.json#2"]),
    "d.csv": (write_cells, ["d.csv:2", "d.csv:3", "d.csv:4"]),
    "d.tsv": (write_cells, ["d.tsv:2", "d.tsv:3", "d.tsv:4"]),
    "D.CSV": (write_cells, ["D.CSV:2", "D.CSV:3", "D.CSV:4"]),
    "d.parquet": (write_parquet, ["d.parquet#0", "d.parquet#1", "d.parquet#2"]),
    "stream.arrow": (write_arrow_stream, ["stream.arrow#0", "stream.arrow#1", "stream.arrow#2"]),
    "file.arrow": (write_arrow_file, ["file.arrow#0", "file.arrow#1", "file.arrow#2"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    write, places = FORMATS[name]
    write(tmp_path / name, RECORDS)
    found = good(rows(str(tmp_path / name), source="s"))
    assert [dict(row.fields) for row in found] == RECORDS
    assert [row.where for row in found] == places
    assert {(row.base, row.source) for row in found} == {(tmp_path, "s")}


def test_types_are_kept_by_typed_formats(tmp_path: Path) -> None:
    records = [{"a": 1, "b": [1.5, None], "c": {"d": True}, "e": None}]
    for name, write in (("d.jsonl", write_lines), ("d.parquet", write_parquet), ("d.arrow", write_arrow_stream)):
        write(tmp_path / name, records)
        assert good(rows(str(tmp_path / name)))[0].fields == records[0]


def test_blank_lines_are_skipped_but_counted_as_lines(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('\n{"a": 1}\n   \n\n{"a": 2}\r\n')
    (tmp_path / "d.csv").write_text("a,b\r\n\r\n1,2\r\n\n3,4")
    assert [row.where for row in good(rows(str(tmp_path / "d.jsonl")))] == ["d.jsonl:2", "d.jsonl:5"]
    assert [row.where for row in good(rows(str(tmp_path / "d.csv")))] == ["d.csv:3", "d.csv:5"]


@pytest.mark.parametrize("name", ["d.jsonl", "lines.json", "array.json", "d.csv", "d.tsv"])
def test_byte_order_mark(name: str, tmp_path: Path) -> None:
    FORMATS[name][0](tmp_path / name, RECORDS)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert [dict(row.fields) for row in good(rows(str(tmp_path / name)))] == RECORDS


def test_bad_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n"x"\nnull\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    items = list(rows(str(path)))
    assert [isinstance(item, Row) for item in items] == [True, False, False, False, False, False, False, True]
    errors = [item for item in items if isinstance(item, BadExample)]
    assert {error.reason for error in errors} == {"unreadable_row"}
    assert [error.where for error in errors] == [f"d.jsonl:{line}" for line in range(2, 8)]
    assert "not valid JSON" in str(errors[0])
    assert "not an object" in str(errors[1])
    assert "UTF-8" in str(errors[4])
    assert all(len(str(error)) < 600 and str(error).encode() for error in errors)


def test_elements_of_an_array_that_are_no_objects(tmp_path: Path) -> None:
    write_array(tmp_path / "d.json", [{"a": 1}, 5, None, {"a": 2}])
    items = list(rows(str(tmp_path / "d.json")))
    assert [isinstance(item, Row) for item in items] == [True, False, False, True]
    assert [error.where for error in bad(iter(items))] == ["d.json#1", "d.json#2"]


def test_broken_array(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('[{"a": 1},\n {"a": ]')
    with pytest.raises(DataError, match="line 2"):
        rows(str(tmp_path / "d.json"))


def test_ragged_and_undecodable_csv_rows(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b"audio,text\na.wav,one, two\nb.wav\nc.wav,\xff\n,\nd.wav,four\n")
    items = list(rows(str(tmp_path / "d.csv")))
    assert [(error.where, error.reason) for error in bad(iter(items))] == [
        (f"d.csv:{line}", "unreadable_row") for line in (2, 3, 4)
    ]
    assert [dict(item.fields) for item in items if isinstance(item, Row)] == [
        {"audio": "", "text": ""},
        {"audio": "d.wav", "text": "four"},
    ]


def test_csv_values_over_several_lines_keep_the_count_of_lines(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('audio,text\na.wav,"one\ntwo, three"\nb.wav,four\n')
    found = good(rows(str(tmp_path / "d.csv")))
    assert [(row.where, row.fields["text"]) for row in found] == [("d.csv:2", "one\ntwo, three"), ("d.csv:4", "four")]


def test_an_open_quote_in_csv_is_an_error_with_its_lines(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('audio,text\na.wav,one\nb.wav,"two\nc.wav,three\n')
    items = list(rows(str(tmp_path / "d.csv")))
    assert [type(item) for item in items] == [Row, BadExample]
    assert "d.csv:3" in str(items[1])
    assert "lines 3 to 4" in str(items[1])


def test_tsv_quotes_that_enclose_nothing_are_text(tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_text(
        'path\tsentence\na.mp3\t"No" she said\nb.mp3\t"open\nc.mp3\t"with ""two"" quotes"\n'
    )
    texts = [row.fields["sentence"] for row in good(rows(str(tmp_path / "d.tsv")))]
    assert texts == ['"No" she said', '"open', 'with "two" quotes']


@pytest.mark.parametrize("header", ["a,a", "a,,"])
def test_header_with_repeated_names(header: str, tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(f"{header}\n1,2\n")
    with pytest.raises(DataError, match=r"d\.csv:1"):
        list(rows(str(tmp_path / "d.csv")))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", b""),
        ("d.jsonl", b"\n \n"),
        ("d.json", b"[]"),
        ("d.csv", b""),
        ("d.csv", b"a,b\n"),
        ("d.tsv", b"a\n"),
    ],
)
def test_empty_source(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="no rows"):
        list(rows(str(tmp_path / name)))


def test_empty_table(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="no rows"):
        list(rows(str(tmp_path / "d.parquet")))


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", RECORDS)
    for read in (rows, fingerprint):
        with pytest.raises(DataError, match=r"train\.jsonl, the nearest") as error:
            read(str(tmp_path / "trian.jsonl"))
        assert "given" in str(error.value)
        with pytest.raises(DataError, match="which is no folder"):
            read(str(tmp_path / "nowhere" / "train.jsonl"))


def test_a_typo_in_a_folder_that_is_here_does_not_ask_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / "data" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="train, the nearest"):
        rows("data/trian")


def test_unknown_hub_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="not on the hub"):
        rows("owner/name", split="train")


@pytest.mark.parametrize("name", ["d.txt", "d", "d.jsonl.gz"])
def test_unknown_extension(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=r"\.jsonl.*\.parquet"):
        rows(str(tmp_path / name))


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    write_lines(tmp_path / "d.jsonl", RECORDS)
    with pytest.raises(DataError, match="split 'train'"):
        rows(str(tmp_path / "d.jsonl"), split="train")


@pytest.mark.parametrize("name", ["d.parquet", "stream.arrow", "file.arrow"])
def test_a_broken_table_is_a_data_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"neither the one nor the other")
    with pytest.raises(DataError, match=name):
        list(rows(str(path)))
    FORMATS[name][0](path, RECORDS * 2000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=name):
        list(rows(str(path)))


# Audio inside data sets

CLIPS = [
    {"bytes": b"RIFF-a", "path": "a.wav"},
    None,
    {"bytes": None, "path": "b.wav"},
    {"bytes": b"RIFF-c", "path": None},
]


def audio_data() -> datasets.Dataset:
    data = datasets.Dataset.from_dict({"audio": CLIPS, "text": ["one", "two", "three", "four"]})
    return data.cast_column("audio", datasets.Audio())


def check_clips(found: list[Row], path_alone: object = "b.wav") -> None:
    first, second, third, fourth = (row.fields["audio"] for row in found)
    assert isinstance(first, Media)
    assert isinstance(fourth, Media)
    assert (first.path, first(), fourth(), second) == ("a.wav", b"RIFF-a", b"RIFF-c", None)
    assert (third() if isinstance(third, Media) else third) == path_alone
    assert pickle.loads(pickle.dumps(fourth))() == b"RIFF-c"
    assert [row.fields["text"] for row in found] == ["one", "two", "three", "four"]


def test_saved_data_set_with_audio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.wav").write_bytes(b"RIFF-b")  # `save_to_disk` takes it in
    audio_data().save_to_disk(str(tmp_path / "saved"))
    found = good(rows(str(tmp_path / "saved"), source="s"))
    check_clips(found, path_alone=b"RIFF-b")
    assert [row.where for row in found] == [f"saved#{index}" for index in range(4)]
    assert {(row.base, row.source) for row in found} == {(tmp_path / "saved", "s")}


@pytest.mark.parametrize("name", ["[1] d.parquet", "stream.arrow", "file.arrow"])
def test_table_with_audio(name: str, tmp_path: Path) -> None:
    path, records = tmp_path / name, audio_data().with_format("arrow")[:].to_pylist()
    {"[1] d.parquet": write_parquet, "stream.arrow": write_arrow_stream, "file.arrow": write_arrow_file}[name](
        path, records
    )
    found = good(rows(str(path)))
    check_clips(found)
    assert [row.where for row in found] == [f"{name}#{index}" for index in range(4)]


def test_bytes_alone(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d.parquet", [{"audio": b"x"}, {"audio": None}, {"audio": b"z"}])
    one, two, three = (row.fields["audio"] for row in good(rows(str(tmp_path / "d.parquet"))))
    assert (one(), two, three()) == (b"x", None, b"z")


def test_clips_are_not_held_in_memory(tmp_path: Path) -> None:
    clip = os.urandom(20_000)
    records = [{"audio": {"bytes": clip + b"%d" % index, "path": f"{index}.wav"}} for index in range(2000)]  # 40 MB
    write_parquet(tmp_path / "d.parquet", records)
    items = rows(str(tmp_path / "d.parquet"))
    del records
    tracemalloc.start()
    found = list(items)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 2000
    for index in (0, 999, 1000, 1999):
        assert good(iter([found[index]]))[0].fields["audio"]() == clip + b"%d" % index
    assert peak < 10_000_000
    assert pickle.dumps(found).__sizeof__() < 1_000_000


def test_splits_of_a_saved_data_set(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    place = str(tmp_path / "saved")
    datasets.DatasetDict(parts).save_to_disk(place)
    assert good(rows(place, split="test"))[0].fields == {"text": "test"}
    with pytest.raises(DataError, match="train, test"):
        rows(place)
    with pytest.raises(DataError, match="train, test"):
        rows(place, split="tset")
    datasets.DatasetDict({"train": parts["train"]}).save_to_disk(str(tmp_path / "one"))
    assert good(rows(str(tmp_path / "one")))[0].fields == {"text": "train"}


def test_split_of_one_saved_data_set(tmp_path: Path) -> None:
    place = str(tmp_path / "saved")
    datasets.Dataset.from_dict({"a": [1]}, split="train").save_to_disk(place)
    assert good(rows(place, split="train"))[0].fields == {"a": 1}
    with pytest.raises(DataError, match="no such split"):
        rows(place, split="test")


def test_folder_of_data_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", RECORDS)
    write_lines(tmp_path / "test.jsonl", RECORDS[:1])
    found = good(rows(str(tmp_path), split="test"))
    assert [dict(row.fields) for row in found] == RECORDS[:1]
    assert found[0].where == f"{tmp_path.name}#0"
    assert len(good(rows(str(tmp_path), split="train[:2]"))) == 2
    with pytest.raises(DataError, match="train, test"):
        rows(str(tmp_path))


def test_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("nothing here")
    with pytest.raises(DataError, match=tmp_path.name):
        rows(str(tmp_path))


def test_code_of_a_data_set_is_not_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "scripted", tmp_path / "ran"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(mark)!r}, 'w')")
    with pytest.raises(DataError, match="script"):
        list(rows(str(folder)))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "metadata.parquet"])
def test_folder_with_metadata(name: str, tmp_path: Path) -> None:
    records = [{"file_name": "clips/a.wav", "transcription": "one"}, {"file_name": "gone.wav", "transcription": "two"}]
    write = {".csv": write_cells, ".jsonl": write_lines, ".parquet": write_parquet}[Path(name).suffix]
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        write(tmp_path / split / name, records)
    found = good(rows(str(tmp_path / "train")))
    assert [dict(row.fields) for row in found] == records
    assert found[0].base == tmp_path / "train"
    assert found == good(rows(str(tmp_path), split="train"))
    with pytest.raises(DataError, match="test, train"):
        rows(str(tmp_path))
    shutil.rmtree(tmp_path / "test")
    assert good(rows(str(tmp_path))) == found


# Fingerprints, size, counts


def test_fingerprint_follows_the_bytes_not_the_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "d.jsonl", RECORDS)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert fingerprint(one) == fingerprint(two)
    assert fingerprint(f"{one}/d.jsonl") == fingerprint(f"{two}/d.jsonl")
    before = fingerprint(one)
    (tmp_path / "one" / "clip.wav").write_bytes(b"RIFF")
    (tmp_path / "one" / "cache-1f.arrow").write_bytes(b"left by a map")
    assert fingerprint(one) == before
    write_lines(tmp_path / "one" / "d.jsonl", RECORDS[::-1])
    assert fingerprint(one) != before
    (tmp_path / "two" / "d.jsonl").rename(tmp_path / "two" / "e.jsonl")
    assert fingerprint(two) != before


def test_fingerprint_of_a_folder_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1")
    before = fingerprint(str(tmp_path))
    (tmp_path / "b.png").write_bytes(b"22")
    assert fingerprint(str(tmp_path)) != before


def test_a_large_file_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"n": index, "text": "x" * 1000}) + "\n" for index in range(10_000))
    tracemalloc.start()
    total = sum(row.fields["n"] for row in rows(str(path)) if isinstance(row, Row))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 10_000 * 9_999 // 2
    assert peak < 1_000_000  # the file has 10 MB


LINES = st.lists(
    st.one_of(
        st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=9)), max_size=3).map(
            lambda value: json.dumps(value).encode()
        ),
        st.text(max_size=9).map(lambda text: json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")),
        st.binary(min_size=1, max_size=9).filter(lambda line: b"\n" not in line and line.strip(b" \r") != b""),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES)
def test_every_line_gives_one_item(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"{}\n" + b"\n".join(lines))
    items = list(rows(str(path)))
    assert [item.where for item in items] == [f"d.jsonl:{number}" for number in range(1, len(lines) + 2)]
    for line, item in zip(lines, items[1:], strict=True):
        if isinstance(item, Row):
            assert json.loads(line) == item.fields
        else:
            assert item.reason == "unreadable_row"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cells=st.lists(
        st.tuples(*[st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=8)] * 2),
        min_size=1,
        max_size=8,
    )
)
def test_csv_gives_back_what_was_written(cells: list[tuple[str, str]], tmp_path: Path) -> None:
    records = [{"audio": one, "text": two} for one, two in cells]
    write_cells(tmp_path / "d.csv", records)
    assert [dict(row.fields) for row in good(rows(str(tmp_path / "d.csv")))] == records
