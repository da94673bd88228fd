"""Audio files: header, piece by piece decoding, and the check of an example.

Everything is read with libsndfile and resampled with soxr. A file's header decides its rate, whatever a manifest says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile as sf  # type: ignore[import-untyped]
import soxr  # type: ignore[import-untyped]

from ...common.errors import BadExample
from .sections import AudioSection, ChannelRule
from .utterance import Segment, Utterance

Wave = npt.NDArray[np.float32]

_BLOCK = 1 << 16
_RELATIVE_TOLERANCE = 0.02
# An MP3 frame may use bits of several frames before it; after a seek these must be decoded first.
_MP3_LEAD = 16 * 1152
_UNKNOWN_FRAMES = 1 << 62  # above it: FLAC written to a pipe, where libsndfile can't seek
# Writers that can't seek back leave the largest sizes in RIFF headers; such files are whole.
_OPEN_SIZE = 0x7FFF0000
_CUT_CHUNK = re.compile(r"^\s*(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """What a file's header says.

    Args:
        rate: samples per second and channel.
        channels: number of channels.
        frames: samples per channel.
    """

    rate: int
    channels: int
    frames: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def header(utterance: Utterance) -> AudioInfo:
    """Rate, channels and length of the whole file, without decoding.

    Raises:
        BadExample: `missing_file`, `empty_audio`, `corrupt_audio`.
    """
    with _open(utterance) as file:
        return _info(file, utterance)


def read(utterance: Utterance, rate: int, channel_rule: ChannelRule) -> Wave:
    """The utterance's piece of audio, mono float32 [T] at `rate` samples per second; nothing else is decoded.

    Args:
        channel_rule: for files with several channels; the utterance's own channel goes first.

    Raises:
        BadExample: as `header`, and `no_such_channel`, `bad_times`, `non_finite_audio`.
    """
    with _open(utterance) as file:
        info = _info(file, utterance)
        channel = _channel(utterance, info, channel_rule)
        first, last = _frames(utterance, info)
        wave = np.concatenate([_mix(block, channel) for block in _decode(file, first, last, utterance)])
    if not np.isfinite(wave).all():
        raise _non_finite(utterance)
    return wave if info.rate == rate else np.asarray(soxr.resample(wave, info.rate, rate, "HQ"), np.float32)


def examine(utterance: Utterance, section: AudioSection, rate: int) -> list[Utterance]:
    """Check one example; audio is never clipped while its text is kept.

    Args:
        rate: samples per second that the model takes; `max_seconds` is compared in such samples.

    Returns:
        The utterance with its real duration; or, where it is too long and `over_long` is `segment`, the pieces that its
        segments make, with the segments' text and times from the piece's start. What no segment covers belongs to no
        piece, and a prompt to the first piece only.

    Raises:
        BadExample: `missing_file`, `corrupt_audio`, `empty_audio`, `silent_audio`, `non_finite_audio`, `too_short`,
            `too_long`, `wrong_duration`, `no_such_channel`, `bad_times`.
    """
    with _open(utterance) as file:
        info = _info(file, utterance)
        channel = _channel(utterance, info, section.channel)
        whole, seconds = _timed(utterance, info, section)
        # Half a sample: times are rounded to samples when the audio is read.
        longest = section.max_seconds + 0.49 / rate
        pieces = [whole] if seconds <= longest else _cut(whole, seconds, longest, section)
        for piece in pieces:
            if (piece.duration or 0.0) < section.min_seconds:
                raise _bad("too_short", "too short", piece, f"{piece.duration:.3f} s", f"{section.min_seconds:g} s")
            if section.scan == "full":
                _scan(file, piece, info, channel, section)
    return pieces


@contextmanager
def _open(utterance: Utterance) -> Iterator[Any]:
    """The opened file, as soundfile's `SoundFile`."""
    source = BytesIO(utterance.audio()) if callable(utterance.audio) else utterance.audio
    if isinstance(source, str) and not Path(source).is_file():
        raise _bad("missing_file", "no such audio file", utterance)
    size = Path(source).stat().st_size if isinstance(source, str) else source.getbuffer().nbytes
    if size == 0:
        raise _bad("empty_audio", "the audio file has no bytes", utterance)
    try:
        file = sf.SoundFile(source)
    except (sf.SoundFileRuntimeError, TypeError) as error:  # TypeError: a name that ends in .raw
        raise _bad("corrupt_audio", f"not readable as audio: {error}", utterance) from error
    with file:
        yield file


def _info(file: Any, utterance: Utterance) -> AudioInfo:
    cut = _CUT_CHUNK.search(file.extra_info)
    if cut and int(cut[2]) < int(cut[1]) < _OPEN_SIZE:
        raise _bad("corrupt_audio", "the audio file is cut off", utterance, f"{cut[2]} bytes", f"{cut[1]} bytes")
    if file.frames > _UNKNOWN_FRAMES:
        raise _bad("corrupt_audio", "the header does not state a length; encode the file again", utterance)
    if file.frames == 0:
        raise _bad("empty_audio", "the audio file holds no samples", utterance)
    return AudioInfo(file.samplerate, file.channels, file.frames)


def _decode(file: Any, first: int, last: int, utterance: Utterance) -> Iterator[Wave]:
    """Samples `first` to `last` as blocks float32 [T, channels].

    Raises:
        BadExample: `corrupt_audio`: undecodable data, or fewer samples than asked.
    """
    position = first
    try:
        lead = min(first, _MP3_LEAD) if file.format == "MP3" else 0
        file.seek(first - lead)
        file.read(lead)
        while position < last:
            block = file.read(min(_BLOCK, last - position), dtype="float32", always_2d=True)
            if len(block) == 0:
                break
            position += len(block)
            yield block
    except sf.SoundFileRuntimeError as error:
        problem = f"the audio can't be decoded after {position / file.samplerate:.2f} s: {error}"
        raise _bad("corrupt_audio", problem, utterance) from error
    if position < last:
        real, stated = (f"{frame / file.samplerate:.2f} s" for frame in (position, last))
        raise _bad("corrupt_audio", "the audio ends early", utterance, real, stated)


def _channel(utterance: Utterance, info: AudioInfo, rule: ChannelRule) -> int | None:
    """Index of the channel to take; None: the mean of several."""
    rule = rule if utterance.channel is None else utterance.channel
    if rule == "mean":
        return 0 if info.channels == 1 else None
    channel = 0 if rule == "first" else rule
    if not 0 <= channel < info.channels:
        raise _bad("no_such_channel", "no such channel", utterance, channel, f"0 to {info.channels - 1}")
    return channel


def _mix(block: Wave, channel: int | None) -> Wave:
    """Mono [T] of a block [T, channels]."""
    return np.asarray(block.mean(axis=1)) if channel is None else block[:, channel]


def _frames(utterance: Utterance, info: AudioInfo) -> tuple[int, int]:
    """First and last (excluded) sample of the piece."""
    first = round(utterance.start * info.rate)
    length = info.frames if utterance.end is None else round((utterance.end - utterance.start) * info.rate)
    last = min(first + length, info.frames)
    if not 0 <= first < last:
        raise _outside(utterance, info)
    return first, last


def _timed(utterance: Utterance, info: AudioInfo, section: AudioSection) -> tuple[Utterance, float]:
    """The utterance with its real duration, which comes with it; ends just past the file's are brought back to it."""
    end = info.seconds if utterance.end is None else utterance.end
    if not 0 <= utterance.start < end <= info.seconds + section.duration_tolerance or utterance.start >= info.seconds:
        raise _outside(utterance, info)
    end = min(end, info.seconds)
    seconds = end - utterance.start
    declared = utterance.duration
    tolerance = max(section.duration_tolerance, _RELATIVE_TOLERANCE * seconds)
    if declared is not None and not abs(declared - seconds) <= tolerance:
        problem = "the declared duration is not the audio's"
        raise _bad("wrong_duration", problem, utterance, f"{declared:g} s", f"{seconds:.3f} s")
    for segment in utterance.segments:
        if not 0 <= segment.start <= segment.end <= seconds + section.duration_tolerance:
            given, expected = f"{segment.start:g} to {segment.end:g} s", f"within 0 to {seconds:.3f} s"
            raise _bad("bad_times", "a segment lies outside of the audio", utterance, given, expected)
    return replace(utterance, end=None if utterance.end is None else end, duration=seconds), seconds


def _scan(file: Any, piece: Utterance, info: AudioInfo, channel: int | None, section: AudioSection) -> None:
    """Decode a piece, and refuse it if it is corrupt, silent or not finite."""
    peak = loudest = 0.0
    for block in _decode(file, *_frames(piece, info), piece):
        if not np.isfinite(block).all():
            raise _non_finite(piece)
        peak = max(peak, float(np.abs(_mix(block, channel)).max()))
        loudest = max(loudest, float(np.abs(block).max()))
    floor = 10 ** (section.silence_dbfs / 20)
    if peak >= floor:
        return
    if loudest < floor:
        problem = "the audio is silent"
    elif channel is None:
        problem = "the audio is silent: its channels cancel out when mixed"
    else:
        problem = f"channel {channel} is silent, others are not"
    level = f"peak {20 * np.log10(peak):.1f} dBFS" if peak > 0 else "all samples are 0"
    raise _bad("silent_audio", problem, piece, level, f"at least {section.silence_dbfs:g} dBFS")


def _bad(reason: str, problem: str, at: Utterance, given: object = None, expected: object = None) -> BadExample:
    name = f" ({at.audio})" if isinstance(at.audio, str) else ""
    return BadExample(reason, problem + name, where=at.where, given=given, expected=expected, do=_ADVICE.get(reason))


def _outside(utterance: Utterance, info: AudioInfo) -> BadExample:
    given, expected = f"{utterance.start} to {utterance.end} s", f"within 0 to {info.seconds:.3f} s"
    return _bad("bad_times", "the piece lies outside of the file", utterance, given, expected)


def _non_finite(utterance: Utterance) -> BadExample:
    return _bad("non_finite_audio", "the audio holds NaN or infinite samples", utterance)


_ADVICE = {
    "corrupt_audio": "replace the file, or take the row out",
    "silent_audio": "choose another channel, or take the row out",
    "too_long": "give the row segments with times and cut there (over_long: segment), or cut the file and its text",
    "wrong_duration": "correct the row: its text may belong to other audio",
    "no_such_channel": "correct the row's channel or the recipe's channel rule",
}


def _cut(whole: Utterance, seconds: float, longest: float, section: AudioSection) -> list[Utterance]:
    """Pieces of at most `longest` seconds, each from the start of a segment to the end of one."""
    expected = f"at most {section.max_seconds:g} s"
    spoken = sorted((s for s in whole.segments if s.text.strip()), key=lambda s: s.start)
    if section.over_long == "refuse" or not spoken:
        raise _bad("too_long", "too long", whole, f"{seconds:.3f} s", expected)
    groups: list[list[Segment]] = []
    for unit in _units(spoken):
        if groups and _end(unit) - groups[-1][0].start <= longest:
            groups[-1] += unit
        else:
            groups.append(unit)
    if (most := max(_end(group) - group[0].start for group in groups)) > longest:
        raise _bad("too_long", "a segment is too long", whole, f"{most:.3f} s", expected)
    # Languages without spaces: the segments' texts in a row are the text already.
    glue = "" if _join(spoken, "") == " ".join(whole.text.split()) else " "
    pieces = [_piece(whole, group, min(_end(group), seconds), _join(group, glue)) for group in groups]
    return [replace(piece, prompt=whole.prompt if n == 0 else None) for n, piece in enumerate(pieces)]


def _units(segments: list[Segment]) -> list[list[Segment]]:
    """Segments by start, those that overlap together: between them there is no place to cut."""
    units: list[list[Segment]] = []
    for segment in segments:
        if units and segment.start < _end(units[-1]):
            units[-1].append(segment)
        else:
            units.append([segment])
    return units


def _end(segments: list[Segment]) -> float:
    return max(segment.end for segment in segments)


def _join(segments: list[Segment], glue: str) -> str:
    return " ".join(glue.join(segment.text for segment in segments).split())


def _piece(whole: Utterance, group: list[Segment], end: float, text: str) -> Utterance:
    first = group[0].start
    shifted = tuple(Segment(s.start - first, s.end - first, s.text) for s in group)
    start = whole.start + first
    return replace(whole, start=start, end=whole.start + end, duration=end - first, text=text, segments=shifted)
