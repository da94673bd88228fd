"""Manifests of every shape, read as they are; each row that can't be used is named with its reason."""

from __future__ import annotations

import csv
import json
import logging
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from luthier.common.errors import BadExample, DataError
from luthier.modalities.asr.manifest import AUDIO_KEYS, TEXT_KEYS, utterances
from luthier.modalities.asr.utterance import Segment, Utterance

Result = Utterance | BadExample


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in records), encoding="utf-8")
    return str(path)


def read(path: str | Path, split: str | None = None) -> list[Result]:
    return list(utterances(str(path), split, "s"))


def one(tmp_path: Path, **fields: Any) -> Result:
    (item,) = read(write(tmp_path / "one.jsonl", fields))
    return item


def good(tmp_path: Path, **fields: Any) -> Utterance:
    item = one(tmp_path, **{"audio": "a.wav", "text": "ciao"} | fields)
    assert isinstance(item, Utterance), item
    return item


def reason(tmp_path: Path, **fields: Any) -> str | None:
    item = one(tmp_path, **{"audio": "a.wav", "text": "ciao"} | fields)
    return item.reason if isinstance(item, BadExample) else None


# Shapes


def test_own_manifest(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.jsonl",
        {"audio": "a.wav", "text": "perché no"},
        {
            "audio": "/abs/b.flac",
            "text": "你好",
            "language": "zh",
            "duration": 4.5,
            "start": 1,
            "end": 5.5,
            "channel": 1,
            "speaker": "Ada",
            "prompt": "before",
            "segments": [{"start": 0, "end": 2.5, "text": "你"}, {"start": 2.5, "end": 4.5, "text": "好", "id": 2}],
            "accent": "north",
        },
    )
    assert read(path) == [
        Utterance(str(tmp_path / "a.wav"), "perché no", "train.jsonl:1", "s"),
        Utterance(
            audio="/abs/b.flac",
            text="你好",
            where="train.jsonl:2",
            source="s",
            start=1.0,
            end=5.5,
            duration=4.5,
            channel=1,
            language="zh",
            speaker="Ada",
            prompt="before",
            segments=(Segment(0.0, 2.5, "你"), Segment(2.5, 4.5, "好")),
            extra={"accent": "north"},
        ),
    ]


def test_nemo(tmp_path: Path) -> None:
    whole = {"audio_filepath": "a.wav", "text": "one", "duration": 3.5, "lang": "en"}
    first, second, third = read(
        write(
            tmp_path / "nemo.json",
            whole,
            whole | {"offset": 2.0, "source_lang": "de", "pnc": "yes"},
            {"audio_filepath": "a.wav", "text": "x", "offset": 1},
        )
    )
    place = str(tmp_path / "a.wav")
    assert first == Utterance(place, "one", "nemo.json:1", "s", duration=3.5, language="en")
    extra = {"source_lang": "de", "pnc": "yes"}
    assert second == Utterance(place, "one", "nemo.json:2", "s", 2.0, 5.5, 3.5, language="en", extra=extra)
    assert third == Utterance(place, "x", "nemo.json:3", "s", 1.0)


def test_funasr(tmp_path: Path) -> None:
    row = {"key": "k1", "source": "/x/a.wav", "source_len": 350, "target": "你好", "target_len": 2}
    (item,) = read(write(tmp_path / "fun.jsonl", row | {"text_language": "<|zh|>"}))
    extra = {"key": "k1", "source_len": 350, "target_len": 2}
    assert item == Utterance("/x/a.wav", "你好", "fun.jsonl:1", "s", language="zh", extra=extra)


@pytest.mark.parametrize("audio", AUDIO_KEYS)
@pytest.mark.parametrize("text", TEXT_KEYS)
@pytest.mark.parametrize("name", ["d.csv", "d.tsv", "d.parquet", "d.jsonl"])
def test_every_name_of_a_column_in_every_format(audio: str, text: str, name: str, tmp_path: Path) -> None:
    record = {audio: "a.wav", text: "perché\u200b, 'no'", "accent": "north"}
    if name == "d.parquet":
        parquet.write_table(pa.Table.from_pylist([record]), tmp_path / name)
    elif name == "d.jsonl":
        write(tmp_path / name, record)
    else:
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(record), delimiter="\t" if name == "d.tsv" else ",")
            writer.writeheader()
            writer.writerow(record)
    (item,) = read(tmp_path / name)
    assert isinstance(item, Utterance)
    assert (item.audio, item.text, item.extra) == (str(tmp_path / "a.wav"), record[text], {"accent": "north"})


def test_csv_converts_numbers_and_ignores_empty_values(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(
        "audio,text,duration,start,end,channel,speaker,language,segments\n"
        'a.wav,one,2.5,0.5,3,1,7,it,"[{""start"": 0, ""end"": 1, ""text"": ""o""}]"\n'
        "b.wav,two,,, ,,,,\n"
        "c.wav,three,long,,,,,,\n"
        "d.wav,four,,,,left,,,\n"
    )
    first, second, third, fourth = read(tmp_path / "d.csv")
    place, segments = str(tmp_path / "a.wav"), (Segment(0.0, 1.0, "o"),)
    assert first == Utterance(place, "one", "d.csv:2", "s", 0.5, 3.0, 2.5, 1, "it", "7", segments=segments)
    assert second == Utterance(str(tmp_path / "b.wav"), "two", "d.csv:3", "s")
    assert isinstance(third, BadExample)
    assert (third.reason, third.where) == ("bad_times", "d.csv:4")
    assert isinstance(fourth, BadExample)
    assert (fourth.reason, fourth.where) == ("bad_channel", "d.csv:5")


def test_audio_folder(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "metadata.csv").write_text("file_name,transcription\nclips/a.wav,one\nclips/b.wav,two\n")
    items = read(tmp_path)
    assert [item.audio for item in items if isinstance(item, Utterance)] == [
        str(tmp_path / "clips" / name) for name in ("a.wav", "b.wav")
    ]


def test_data_set_with_audio_inside(tmp_path: Path) -> None:
    clips = [{"bytes": b"RIFF-a", "path": "a.mp3"}, None]
    data = datasets.Dataset.from_dict({"path": ["x/a.mp3", "b"], "audio": clips, "sentence": ["one", "two"]})
    data.cast_column("audio", datasets.Audio()).save_to_disk(str(tmp_path / "saved"))
    first, second = read(tmp_path / "saved")
    assert isinstance(first, Utterance)
    assert callable(first.audio)
    assert first.audio() == b"RIFF-a"
    assert (first.text, first.where, first.extra) == ("one", "saved#0", {"path": "x/a.mp3"})
    copy = pickle.loads(pickle.dumps(first))
    assert copy.audio() == b"RIFF-a"
    assert isinstance(second, BadExample)
    assert (second.reason, second.where) == ("no_audio", "saved#1")  # `path` doesn't stand in for some rows only


# Which keys, which paths


def test_the_documented_order_decides_and_a_conflict_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"normalized_text": "ten", "text": "10", "path": "x/a.wav", "audio": "y/a.wav"}
    reverse = dict(reversed(row.items()))
    with caplog.at_level(logging.WARNING):
        items = read(write(tmp_path / "d.jsonl", row, reverse))
    for item in items:
        assert isinstance(item, Utterance)
        assert (item.text, item.audio) == ("10", str(tmp_path / "y/a.wav"))
        assert item.extra == {"normalized_text": "ten", "path": "x/a.wav"}
    assert [record.getMessage() for record in caplog.records] == [
        "d.jsonl:1: 'text' and 'normalized_text' differ; 'text' is used, here and in all rows"
    ]


def test_an_empty_value_is_not_replaced_by_another_column(tmp_path: Path) -> None:
    assert reason(tmp_path, text=None, sentence="other") == "no_text"
    assert reason(tmp_path, audio="", path="b.wav") == "no_audio"


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "both.wav").touch()
    (here / "here.wav").touch()
    monkeypatch.chdir(here)
    path = write(there / "d.jsonl", *({"audio": f"{name}.wav", "text": "x"} for name in ("both", "here", "none")))
    places = [item.audio for item in read(path) if isinstance(item, Utterance)]
    assert places == [str(there / "both.wav"), str(here / "here.wav"), str(there / "none.wav")]


# Bad rows


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": None}, "no_text"),
        ({"text": 5}, "text_type"),
        ({"text": ["a"]}, "text_type"),
        ({"text": "\ud83d"}, "text_type"),
        ({"text": ""}, "empty_text"),
        ({"text": " \u3000\n"}, "empty_text"),
        ({"audio": None}, "no_audio"),
        ({"audio": "  "}, "no_audio"),
        ({"audio": 3}, "no_audio"),
        ({"audio": {"array": [0.0], "sampling_rate": 16000}}, "no_audio"),
        ({"audio": "sox a.wav -t wav - |"}, "pipe"),
        ({"duration": 0}, "bad_times"),
        ({"duration": -1}, "bad_times"),
        ({"duration": True}, "bad_times"),
        ({"duration": "nan"}, "bad_times"),
        ({"duration": [1]}, "bad_times"),
        ({"duration": 10**400}, "bad_times"),
        ({"start": "x"}, "bad_times"),
        ({"start": -0.1}, "bad_times"),
        ({"start": 2, "end": 2}, "bad_times"),
        ({"end": 0}, "bad_times"),
        ({"end": float("inf")}, "bad_times"),
        ({"start": 1, "offset": 2, "duration": 1}, "bad_times"),
        ({"channel": -1}, "bad_channel"),
        ({"channel": True}, "bad_channel"),
        ({"channel": 0.5}, "bad_channel"),
        ({"channel": "-1"}, "bad_channel"),
        ({"channel": [0]}, "bad_channel"),
        ({"language": ["it"]}, "bad_field"),
        ({"speaker": {"id": 1}}, "bad_field"),
        ({"prompt": True}, "bad_field"),
        ({"segments": 5}, "bad_segments"),
        ({"segments": "[{"}, "bad_segments"),
        ({"segments": ["a"]}, "bad_segments"),
        ({"segments": [{"start": 0, "end": 1}]}, "bad_segments"),
        ({"segments": [{"start": 0, "text": "a"}]}, "bad_segments"),
        ({"segments": [{"start": 1, "end": 1, "text": "a"}]}, "bad_segments"),
        ({"segments": [{"start": -1, "end": 1, "text": "a"}]}, "bad_segments"),
        ({"segments": [{"start": 0, "end": 2, "text": "a"}, {"start": 1, "end": 3, "text": "b"}]}, "bad_segments"),
        ({"segments": [{"start": 1, "end": 2, "text": "a"}, {"start": 0, "end": 1, "text": "b"}]}, "bad_segments"),
        ({"segments": [{"start": 0, "end": 2.1, "text": "a"}], "duration": 2}, "bad_segments"),
        ({"segments": [{"start": 0, "end": 2.1, "text": "a"}], "start": 8, "end": 10}, "bad_segments"),
    ],
)
def test_bad_rows(fields: dict[str, Any], expected: str, tmp_path: Path) -> None:
    good = {"audio": "a.wav", "text": "ciao"}
    path = write(tmp_path / "d.jsonl", good, good)
    lines = Path(path).read_text().splitlines()
    Path(path).write_text("\n".join([lines[0], json.dumps(good | fields), lines[1]]))
    before, item, after = read(path)
    assert isinstance(before, Utterance)
    assert isinstance(after, Utterance)
    assert isinstance(item, BadExample)
    assert (item.reason, item.where) == (expected, "d.jsonl:2")
    assert "given:" in str(item)
    assert "expected:" in str(item)
    assert "do:" in str(item)


def test_a_missing_key_names_the_keys_that_are_there_and_those_that_are_read(tmp_path: Path) -> None:
    no_audio, no_text = read(write(tmp_path / "d.jsonl", {"sound": "a.wav", "text": "x"}, {"audio": "a", "txt": "x"}))
    assert isinstance(no_audio, BadExample)
    assert no_audio.reason == "no_audio"
    assert "sound, text" in str(no_audio)
    assert all(key in str(no_audio) for key in AUDIO_KEYS)
    assert isinstance(no_text, BadExample)
    assert no_text.reason == "no_text"
    assert all(key in str(no_text) for key in TEXT_KEYS)


def test_values_that_are_fine(tmp_path: Path) -> None:
    assert good(tmp_path, channel=0).channel == 0
    assert good(tmp_path, channel="1").channel == 1
    assert good(tmp_path, channel=1.0).channel == 1
    assert good(tmp_path, speaker=84).speaker == "84"
    assert good(tmp_path, text=" as it is ").text == " as it is "
    assert good(tmp_path, start=1, end=3).duration == 2.0
    assert good(tmp_path, start=0.5, duration=2).end is None
    assert good(tmp_path, segments=[]).segments == ()
    touching = [{"start": 0, "end": 1, "text": "a"}, {"start": 1, "end": 2.04, "text": ""}]  # rounded by 40 ms
    assert len(good(tmp_path, segments=touching, duration=2).segments) == 2
    assert len(good(tmp_path, segments=touching).segments) == 2


def test_a_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        utterances(str(tmp_path / "none.jsonl"))


# Kaldi


def kaldi(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_scp", ".scp")).write_text(content, encoding="utf-8")
    return folder


def summary(items: list[Result]) -> list[tuple[str, str]]:
    return [(item.reason if isinstance(item, BadExample) else "good", str(item.where)) for item in items]


def test_kaldi(tmp_path: Path) -> None:
    folder = kaldi(
        tmp_path / "train", wav_scp="a /x/a.wav\nb\tsub dir/b.wav\n", text="b  due\tvolte \na uno\n", utt2spk="a Ada\n"
    )
    assert read(folder) == [
        Utterance(str(folder / "sub dir/b.wav"), "due\tvolte", "train/text:1", "s", extra={"key": "b"}),
        Utterance("/x/a.wav", "uno", "train/text:2", "s", speaker="Ada", extra={"key": "a"}),
    ]
    assert read(tmp_path, "train") == read(folder)


def test_kaldi_with_segments(tmp_path: Path) -> None:
    folder = kaldi(
        tmp_path / "k",
        wav_scp="r /x/r.wav\nunused /x/u.wav\n",
        segments="u1 r 0.5 2\nu2 r 2 -1\nu3 lost 0 1\nu4 r 3\nu5 r 3 2\nu6 r 4 5\n",
        text="u1 one\nu2 two\nu3 three\nu4 four\nu5 five\nr six\n",
    )
    items = read(folder)
    assert items[0] == Utterance("/x/r.wav", "one", "k/text:1", "s", 0.5, 2.0, 1.5, extra={"key": "u1"})
    assert items[1] == Utterance("/x/r.wav", "two", "k/text:2", "s", 2.0, extra={"key": "u2"})
    assert summary(items[2:]) == [
        ("no_audio", "k/text:3"),
        ("bad_times", "k/segments:4"),
        ("bad_times", "k/text:5"),
        ("no_audio", "k/text:6"),
        ("no_text", "k/segments:6"),
        ("no_text", "k/wav.scp:2"),
    ]


def test_kaldi_drops_nothing_in_silence_and_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folder = kaldi(
        tmp_path / "k",
        wav_scp=f"a /x/a.wav\n\npiped touch {mark} |\nmute /x/m.wav\nempty /x/e.wav\na /x/other.wav\nbare\n",
        text="a one\npiped two\nlost three\nempty\nbare four\na again\n",
    )
    assert summary(read(folder)) == [
        ("duplicate_id", "k/wav.scp:6"),
        ("duplicate_id", "k/text:6"),
        ("good", "k/text:1"),
        ("pipe", "k/text:2"),
        ("no_audio", "k/text:3"),
        ("empty_text", "k/text:4"),
        ("no_audio", "k/text:5"),
        ("no_text", "k/wav.scp:4"),
    ]
    assert not mark.exists()


def test_kaldi_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without `text`"):
        utterances(str(kaldi(tmp_path / "k", wav_scp="a /x/a.wav\n")))


def test_kaldi_text_that_is_not_utf8(tmp_path: Path) -> None:
    folder = kaldi(tmp_path / "k", wav_scp="a /x/a.wav\n", text="")
    (folder / "text").write_bytes(b"a perch\xe9\n")
    assert summary(read(folder)) == [("text_type", "k/text:1")]


# Counts

VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.lists(st.integers()))
KEYS = st.sampled_from(
    ["audio", "text", "duration", "start", "end", "offset", "channel", "segments", "language", "speaker", "source"]
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(st.dictionaries(KEYS, VALUES), min_size=1, max_size=6), order=st.randoms())
def test_every_row_gives_one_item_whatever_the_order(records: list[dict[str, Any]], order: Any, tmp_path: Path) -> None:
    def outcome(rows: list[dict[str, Any]]) -> Counter[str]:
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        items = read(tmp_path / "d.jsonl")
        assert [item.where for item in items] == [f"d.jsonl:{number}" for number in range(1, len(rows) + 1)]
        return Counter(
            item.reason if isinstance(item, BadExample) else repr((item.audio, item.text, item.start, item.end))
            for item in items
        )

    shuffled = order.sample(records, len(records))
    assert outcome(records) == outcome(shuffled)


def test_ten_thousand_rows_are_streamed(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *({"audio": f"{n}.wav", "text": "x" if n % 10 else ""} for n in range(10_000)))
    items = utterances(path)
    assert isinstance(next(items), BadExample)
    os.truncate(path, os.path.getsize(path) // 2)  # seen only if the rest is still to be read
    rest = sum(1 for _ in items)
    assert 4000 < rest < 9000
