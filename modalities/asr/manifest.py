"""Manifests of speech recognition, read as they are: ours, NeMo's, FunASR's, Kaldi's, tables and audio folders.

One set of rules serves all shapes but Kaldi's, whose files are first joined into the same kind of row:

- audio: the first key of AUDIO_KEYS that the row has; text: the first of TEXT_KEYS. Only the keys decide, never
  which value is filled, so all rows of a source are read alike. Where a later key holds another value, a warning
  says once which one is used. Every field that is not used stays in `extra`.
- a relative path is meant against the manifest's folder; if nothing is there, against the current folder.
- `offset` (NeMo) and `duration` give start and end. Without `offset`, `duration` is only what the source declares.
- `language`, `lang`, `source_lang` or `text_language`; `<|zh|>` is read as `zh`.
- in a table without types (CSV) an empty optional value counts as absent, and numbers are converted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...common.data.rows import Row
from ...common.data.sources import Media, rows
from ...common.errors import BadExample, DataError
from .utterance import Segment, Utterance

AUDIO_KEYS = ("audio", "audio_filepath", "path", "file", "file_name", "wav", "source")
TEXT_KEYS = ("text", "sentence", "transcription", "transcript", "target", "normalized_text")
LANGUAGE_KEYS = ("language", "lang", "source_lang", "text_language")

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_TIMES_SLACK = 0.05  # seconds; durations and segment times are commonly rounded
_OWN = frozenset({"start", "end", "offset", "duration", "channel", "speaker", "prompt", "segments"})

log = logging.getLogger(__name__)


def utterances(source_path: str, split: str | None = None, name: str = "") -> Iterator[Utterance | BadExample]:
    """Utterances of a source in its own order; each row gives an Utterance or a BadExample, so counts add up.

    Reasons of bad examples: `unreadable_row`, `no_audio`, `pipe`, `no_text`, `text_type`, `empty_text`,
    `bad_times`, `bad_segments`, `bad_channel`, `bad_field`; for Kaldi folders also `duplicate_id`. Audio files are
    not opened. In a Kaldi folder an id in `text` without audio is `no_audio`, one with audio and no line in `text`
    is `no_text`; entries of `wav.scp` that are commands (`... |`) are refused, not run.

    Args:
        source_path: file, folder (Kaldi, audio folder, saved data set) or data set on the hub.
        split: split of a data set; for Kaldi, a folder inside `source_path`.
        name: name of the source in the recipe.

    Raises:
        DataError: the source as a whole can't be read (see `common.data.sources.rows`), or is not complete.
    """
    folder = Path(source_path, split) if split else Path(source_path)
    if not (folder / "wav.scp").is_file():
        return _convert(rows(source_path, split=split, source=name))
    if not (folder / "text").is_file():
        raise DataError("a Kaldi folder without `text`", where=folder, expected="wav.scp and text", do="add `text`")
    return _convert(_kaldi_rows(folder, name))


def _convert(items: Iterable[Row | BadExample]) -> Iterator[Utterance | BadExample]:
    warned: set[tuple[str, str]] = set()
    for item in items:
        yield _checked(item, warned) if isinstance(item, Row) else item


def _checked(row: Row, warned: set[tuple[str, str]]) -> Utterance | BadExample:
    try:
        return _utterance(row, warned)
    except BadExample as error:
        return error.with_traceback(None)  # a traceback would keep the row in memory


def _utterance(row: Row, warned: set[tuple[str, str]]) -> Utterance:
    fields = row.fields
    audio_key = _key(row, AUDIO_KEYS, "no_audio", warned)
    text_key = _key(row, TEXT_KEYS, "no_text", warned)
    language_key = next((key for key in LANGUAGE_KEYS if key in fields), None)
    start, end, duration = _times(row)
    length = end - start if end is not None else duration
    language = _label(row, language_key) if language_key else None
    used = _OWN | {audio_key, text_key, language_key}
    return Utterance(
        audio=_audio(row, audio_key),
        text=_text(row, text_key),
        where=row.where,
        source=row.source,
        start=start,
        end=end,
        duration=length if duration is None else duration,
        channel=_channel(row),
        language=language.removeprefix("<|").removesuffix("|>") if language else None,
        speaker=_label(row, "speaker"),
        prompt=_label(row, "prompt"),
        segments=_segments(row, length),
        extra={key: value for key, value in fields.items() if key not in used},
    )


def _key(row: Row, keys: Sequence[str], reason: str, warned: set[tuple[str, str]]) -> str:
    """The first of the keys that the row has."""
    present = [key for key in keys if key in row.fields]
    if not present:
        problem, given = f"the row has no {reason.removeprefix('no_')}", ", ".join(map(str, row.fields))
        expected, do = f"one of the keys {', '.join(keys)}", "add the field, or rename it"
        raise BadExample(reason, problem, where=row.where, given=f"the keys {given}", expected=expected, do=do)
    used = present[0]
    for other in present[1:]:
        if (used, other) not in warned and _differ(row.fields[used], row.fields[other]):
            warned.add((used, other))
            log.warning("%s: %r and %r differ; %r is used, here and in all rows", row.where, used, other, used)
    return used


def _differ(one: Any, other: Any) -> bool:
    """Whether two values of one meaning disagree; paths may name the same file from different folders."""
    values = [value.path if isinstance(value, Media) else value for value in (one, other)]
    names = {os.path.basename(value.strip()) for value in values if isinstance(value, str) and value}
    return len(names) > 1


def _bad(row: Row, reason: str, problem: str, given: object, expected: str) -> BadExample:
    return BadExample(reason, problem, where=row.where, given=repr(given), expected=expected, do="correct the row")


def _audio(row: Row, key: str) -> str | Media:
    value = row.fields[key]
    if isinstance(value, Media):
        return value
    if isinstance(value, Mapping) and not value.get("bytes"):
        value = value.get("path")
    if not isinstance(value, str) or not value.strip():
        raise _bad(row, "no_audio", f"{key!r} names no audio file", value, "a path")
    if value.rstrip().endswith("|"):
        raise _bad(row, "pipe", f"{key!r} is a command, and commands are not run", value, "the path of an audio file")
    beside = os.path.join(row.base, value)
    return os.path.abspath(value) if not os.path.exists(beside) and os.path.exists(value) else beside


def _text(row: Row, key: str) -> str:
    value = row.fields[key]
    if value is None:
        raise _bad(row, "no_text", f"{key!r} holds nothing", value, "a transcript")
    if not isinstance(value, str):
        raise _bad(row, "text_type", f"{key!r} is not text", value, "a string")
    if not value.strip():
        raise _bad(row, "empty_text", f"{key!r} is empty", value, "a transcript")
    if _SURROGATE.search(value):
        raise _bad(row, "text_type", f"{key!r} holds half of a character (a lone surrogate)", value, "valid Unicode")
    return value


def _is_absent(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _label(row: Row, key: str) -> str | None:
    """A short text such as a language or a speaker; numbers are names too."""
    value = row.fields.get(key)
    if _is_absent(value):
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _bad(row, "bad_field", f"{key!r} is not text", value, "a string")
    return str(value)


def _seconds(row: Row, key: str, fields: Mapping[str, Any], reason: str = "bad_times") -> float | None:
    value = fields.get(key)
    if _is_absent(value):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise _bad(row, reason, f"{key!r} is not a time", value, "seconds, 0 or more")
    return number


def _times(row: Row) -> tuple[float, float | None, float | None]:
    """(start, end, declared duration) in seconds."""
    start, end, offset, duration = (_seconds(row, key, row.fields) for key in ("start", "end", "offset", "duration"))
    if duration == 0:
        raise _bad(row, "bad_times", "'duration' is zero", duration, "more than 0 seconds")
    if offset is not None:
        if start is not None and start != offset:
            raise _bad(row, "bad_times", "'start' and 'offset' differ", (start, offset), "one of them")
        start = offset
        end = offset + duration if end is None and duration is not None else end
    start = start or 0.0
    if end is not None and end <= start:
        raise _bad(row, "bad_times", "the end does not come after the start", (start, end), "start < end, in seconds")
    return start, end, duration


def _channel(row: Row) -> int | None:
    value = row.fields.get("channel")
    if _is_absent(value):
        return None
    number = None if isinstance(value, bool) else value
    if isinstance(value, str) and value.strip().isdecimal():
        number = int(value)
    if isinstance(number, float) and number.is_integer():  # tables with gaps turn whole numbers into these
        number = int(number)
    if not isinstance(number, int) or number < 0:
        raise _bad(row, "bad_channel", "'channel' is not a channel", value, "a whole number, 0 or more")
    return number


def _segments(row: Row, length: float | None) -> tuple[Segment, ...]:
    """Segments in order, without overlap, inside the utterance if its length is known."""
    value = row.fields.get("segments")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _bad(row, "bad_segments", "'segments' is not valid JSON", value, "a list") from None
    if _is_absent(value):
        return ()
    if not isinstance(value, list | tuple):
        raise _bad(row, "bad_segments", "'segments' is not a list", value, "a list of {start, end, text}")
    found = tuple(_segment(row, item) for item in value)
    for before, after in pairwise(found):
        if after.start < before.end:
            given = (before.start, before.end), (after.start, after.end)
            raise _bad(row, "bad_segments", "two segments overlap or are out of order", given, "ascending times")
    if found and length is not None and found[-1].end > length + _TIMES_SLACK:
        expected = f"at most {length:g} s: times count from the utterance's start"
        raise _bad(row, "bad_segments", "a segment ends after its utterance", found[-1].end, expected)
    return found


def _segment(row: Row, item: Any) -> Segment:
    if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
        raise _bad(row, "bad_segments", "a segment is not complete", item, "{start, end, text}")
    start, end = (_seconds(row, key, item, "bad_segments") for key in ("start", "end"))
    if start is None or end is None or end <= start:
        raise _bad(row, "bad_segments", "a segment has no valid times", item, "start < end, in seconds")
    return Segment(start, end, item["text"])


# Kaldi

_Entries = dict[str, tuple[str, str]]  # id -> (where, the rest of its line)
_TO_THE_END = (["-1"], ["-1.0"])  # ends in `segments` that stand for the end of the file


def _kaldi_rows(folder: Path, source: str) -> Iterator[Row | BadExample]:
    repeated: list[BadExample] = []
    names = ("wav.scp", "text", "segments", "utt2spk")
    wavs, texts, cuts, speakers = (_entries(folder / name, repeated) for name in names)
    yield from repeated
    is_cut = (folder / "segments").is_file()
    pieces = cuts if is_cut else {key: (where, key) for key, (where, _) in wavs.items()}
    for key, (where, text) in texts.items():
        recording, *times = pieces.get(key, ("", ""))[1].split() or [""]
        if recording not in wavs:
            file = "wav.scp" if recording or not is_cut else "segments"
            yield _unmatched("no_audio", where, recording or key, file)
        elif is_cut and len(times) != 2:
            problem, expected = "not a line of segments", "id recording start end"
            yield BadExample("bad_times", problem, where=pieces[key][0], given=pieces[key][1], expected=expected)
        else:
            times = times[:1] if times[1:] in _TO_THE_END else times
            fields = {"key": key, "audio": wavs[recording][1], "text": text, "speaker": speakers.get(key, ("", ""))[1]}
            yield Row(fields | dict(zip(("start", "end"), times, strict=False)), where, folder, source)
    for key, (where, _) in pieces.items():
        if key not in texts:
            yield _unmatched("no_text", where, key, "text")
    used = {line.split()[0] for _, line in pieces.values() if line}
    for key, (where, _) in wavs.items():
        if key not in used:
            yield _unmatched("no_text", where, key, "segments")


def _unmatched(reason: str, where: str, key: str, file: str) -> BadExample:
    problem = f"the id has no line in `{file}`"
    return BadExample(reason, problem, where=where, given=key, expected=f"a line `{key} ...`", do="add the line")


def _entries(path: Path, repeated: list[BadExample]) -> _Entries:
    """Lines of a Kaldi file by id; an id that is there already goes to `repeated`. No file: no entries."""
    entries: _Entries = {}
    if not path.is_file():
        return entries
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            where = f"{path.parent.name}/{path.name}:{number}"
            key, *rest = line.split(maxsplit=1) or [""]
            if key in entries:
                problem = "an id that is there already"
                repeated.append(BadExample("duplicate_id", problem, where=where, given=key, do="keep one line per id"))
            elif key:
                entries[key] = where, "".join(rest).strip()
    return entries
