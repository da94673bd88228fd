"""Audio files as they come: right ones are read right, wrong ones are named with their reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from pydantic import ValidationError
from transformers import WhisperFeatureExtractor

from luthier.common.errors import BadExample
from luthier.modalities.asr.audio import examine, header, read
from luthier.modalities.asr.features import LogMel
from luthier.modalities.asr.sections import AudioSection
from luthier.modalities.asr.utterance import Segment, Utterance

RATE = 16000


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0, peak: float = 0.5) -> np.ndarray:
    return peak * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write(path: Path, samples: np.ndarray, rate: int = RATE, subtype: str | None = None) -> Utterance:
    sf.write(path, samples, rate, subtype=subtype)
    return Utterance(audio=str(path), text="text", where="train.jsonl:7")


def reason(utterance: Utterance, **settings: Any) -> str:
    with pytest.raises(BadExample) as caught:
        examine(utterance, AudioSection(**settings), RATE)
    assert caught.value.where == "train.jsonl:7"
    return caught.value.reason


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("suffix", "subtype"), [("wav", "PCM_16"), ("wav", "PCM_24"), ("wav", "FLOAT"), ("flac", "PCM_24")]
)
def test_every_form_reads_as_the_same_wave(tmp_path, rate, channels, suffix, subtype):
    samples = np.repeat(tone(0.5, rate)[:, None], channels, axis=1)
    utterance = write(tmp_path / f"a.{suffix}", samples, rate, subtype)
    info = header(utterance)
    assert (info.rate, info.channels, info.frames, info.seconds) == (rate, channels, len(samples), 0.5)
    wave = read(utterance, RATE, "mean")
    assert wave.dtype == np.float32
    assert wave.shape == (8000,)
    middle = slice(800, -800)  # the resampler's filter reaches beyond the ends
    np.testing.assert_allclose(wave[middle], tone(0.5)[middle], atol=2e-3)


def test_the_header_decides_the_rate(tmp_path):
    """The same tone at 8 and 16 kHz has its peak in the same mel bin."""
    mel = LogMel.from_extractor(WhisperFeatureExtractor())
    bins = []
    for rate in (8000, 16000):
        utterance = write(tmp_path / f"{rate}.wav", tone(1, rate, 1000), rate)
        utterance = replace(utterance, extra={"sampling_rate": 44100})
        bins.append(int(mel(read(utterance, RATE, "mean")).mean(1).argmax()))
    assert bins[0] == bins[1]


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_only_the_piece_is_read(tmp_path, suffix):
    noise = np.convolve(0.2 * np.random.default_rng(0).standard_normal(20 * RATE), np.ones(5) / 5, "same")
    utterance = write(tmp_path / f"a.{suffix}", noise)
    whole = sf.read(utterance.audio, dtype="float32")[0]
    np.testing.assert_allclose(read(utterance, RATE, "mean"), whole, atol=1e-6)
    for start in (0.3125, 0.75, 1.5, 12.5):
        piece = read(replace(utterance, start=start, end=start + 0.5), RATE, "mean")
        assert piece.shape == (8000,)
        np.testing.assert_allclose(piece, whole[int(start * RATE) :][:8000], atol=1e-5)


def test_bytes_in_place_of_a_path(tmp_path):
    utterance = write(tmp_path / "a.flac", tone(0.5))
    inside = replace(utterance, audio=Path(utterance.audio).read_bytes)
    np.testing.assert_array_equal(read(inside, RATE, "mean"), read(utterance, RATE, "mean"))
    assert examine(inside, AudioSection(), RATE)[0].duration == 0.5


def test_channel_rules(tmp_path):
    left, right = tone(0.5, hertz=300), tone(0.5, hertz=700, peak=0.25)
    utterance = write(tmp_path / "a.wav", np.stack([left, right], 1), subtype="FLOAT")
    for rule, expected in (("first", left), (0, left), (1, right), ("mean", (left + right) / 2)):
        np.testing.assert_allclose(read(utterance, RATE, rule), expected, atol=1e-6)
    np.testing.assert_allclose(read(replace(utterance, channel=1), RATE, "first"), right, atol=1e-6)
    assert reason(utterance, channel=2) == "no_such_channel"
    assert reason(replace(utterance, channel=-1)) == "no_such_channel"


# ---------------------------------------------------------------------------------------------- checking


def test_a_good_example_gets_its_real_duration(tmp_path):
    utterance = replace(write(tmp_path / "a.wav", tone(2.5, 44100), 44100), duration=2.49)
    assert examine(utterance, AudioSection(), RATE) == [replace(utterance, duration=2.5)]
    piece = replace(utterance, start=0.5, end=2.55, duration=None)
    assert examine(piece, AudioSection(), RATE) == [replace(piece, end=2.5, duration=2.0)]


def test_antiphase_channels_are_silent_when_mixed(tmp_path):
    wave = tone(0.5)
    utterance = write(tmp_path / "a.wav", np.stack([wave, -wave], 1))
    with pytest.raises(BadExample, match="cancel") as caught:
        examine(utterance, AudioSection(), RATE)
    assert caught.value.reason == "silent_audio"
    assert examine(utterance, AudioSection(channel="first"), RATE)
    assert examine(replace(utterance, channel=1), AudioSection(), RATE)


def test_silence(tmp_path):
    assert reason(write(tmp_path / "zeros.wav", np.zeros(RATE))) == "silent_audio"
    # 0.0005 is -66 dB of full scale, 0.002 is -54 dB.
    assert reason(write(tmp_path / "faint.wav", tone(1, peak=0.0005), subtype="FLOAT")) == "silent_audio"
    assert examine(write(tmp_path / "low.wav", tone(1, peak=0.002), subtype="FLOAT"), AudioSection(), RATE)
    one_sided = write(tmp_path / "b.wav", np.stack([np.zeros(RATE), tone(1)], 1))
    with pytest.raises(BadExample, match="channel 0 is silent, others are not"):
        examine(one_sided, AudioSection(channel="first"), RATE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_samples(tmp_path, value):
    wave = tone(1)
    wave[12345] = value
    utterance = write(tmp_path / "a.wav", wave, subtype="FLOAT")
    assert reason(utterance) == "non_finite_audio"
    with pytest.raises(BadExample, match="NaN or infinite"):
        read(utterance, RATE, "mean")


def test_files_that_are_no_audio(tmp_path):
    utterance = write(tmp_path / "a.wav", tone(1))
    assert reason(replace(utterance, audio=str(tmp_path / "absent.wav"))) == "missing_file"
    for name in ("noise.wav", "noise.flac", "noise.mp3", "noise.raw"):
        (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(5000))
        assert reason(replace(utterance, audio=str(tmp_path / name))) == "corrupt_audio"
    (tmp_path / "nothing.wav").write_bytes(b"")
    assert reason(replace(utterance, audio=str(tmp_path / "nothing.wav"))) == "empty_audio"
    assert reason(replace(utterance, audio=lambda: b"")) == "empty_audio"
    assert reason(write(tmp_path / "headed.wav", np.zeros(0))) == "empty_audio"


def test_the_message_names_row_and_file(tmp_path):
    (tmp_path / "broken.wav").write_bytes(b"RIFF and no more")
    utterance = Utterance(audio=str(tmp_path / "broken.wav"), text="", where="train.jsonl:7")
    with pytest.raises(BadExample, match=r"(?s)train\.jsonl:7.*broken\.wav") as caught:
        examine(utterance, AudioSection(), RATE)
    assert "ffmpeg" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["wav", "aiff", "flac", "mp3"])
def test_a_truncated_file_is_corrupt(tmp_path, suffix):
    noise = 0.3 * np.random.default_rng(0).standard_normal(3 * RATE).clip(-3, 3)
    utterance = write(tmp_path / f"a.{suffix}", noise)
    content = Path(utterance.audio).read_bytes()
    Path(utterance.audio).write_bytes(content[: len(content) // 2])
    assert reason(utterance) == "corrupt_audio"
    with pytest.raises(BadExample):
        read(utterance, RATE, "mean")


def test_a_damaged_middle_is_found_by_the_full_scan_only(tmp_path):
    utterance = write(tmp_path / "a.flac", 0.3 * np.random.default_rng(0).standard_normal(3 * RATE).clip(-3, 3))
    content = bytearray(Path(utterance.audio).read_bytes())
    content[len(content) // 2 : len(content) // 2 + 20000] = bytes(20000)
    Path(utterance.audio).write_bytes(content)
    assert examine(utterance, AudioSection(scan="headers"), RATE)
    assert reason(utterance) == "corrupt_audio"


def test_a_wav_written_to_a_pipe_is_whole(tmp_path):
    """Its header holds the largest sizes, because its writer could not go back."""
    utterance = write(tmp_path / "a.wav", tone(1))
    content = bytearray(Path(utterance.audio).read_bytes())
    at = content.index(b"data") + 4
    content[4:8] = content[at : at + 4] = b"\xff" * 4
    Path(utterance.audio).write_bytes(content)
    assert examine(utterance, AudioSection(), RATE)[0].duration == 1.0
    assert read(utterance, RATE, "mean").shape == (RATE,)


def test_a_flac_written_to_a_pipe_is_refused_by_name(tmp_path):
    """libsndfile can't find places in it: its header states 0 samples."""
    utterance = write(tmp_path / "a.flac", tone(1))
    content = bytearray(Path(utterance.audio).read_bytes())
    # The 36 bits after "fLaC", a block header of 4 bytes, and 13 bytes and 4 bits of the stream's description.
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    Path(utterance.audio).write_bytes(content)
    with pytest.raises(BadExample, match="does not state a length") as caught:
        header(utterance)
    assert caught.value.reason == "corrupt_audio"


def test_declared_duration(tmp_path):
    utterance = write(tmp_path / "a.wav", tone(10))
    # 2% of 10 s is more than 0.1 s.
    for declared in (9.81, 10.19):
        assert examine(replace(utterance, duration=declared), AudioSection(), RATE)[0].duration == 10.0
    for declared in (5.0, 9.79, 10.21, 0.0, float("nan")):
        assert reason(replace(utterance, duration=declared)) == "wrong_duration"
    assert reason(replace(utterance, start=5.0, duration=10.0)) == "wrong_duration"
    assert examine(replace(utterance, start=5.0, duration=5.0), AudioSection(), RATE)[0].duration == 5.0


@pytest.mark.parametrize(
    ("start", "end"), [(-1, 1), (1, 1), (1.5, 1), (2, None), (3, 4), (0, 2.2), (float("nan"), 1), (0, float("nan"))]
)
def test_pieces_outside_of_the_file(tmp_path, start, end):
    utterance = write(tmp_path / "a.wav", tone(2))
    assert reason(replace(utterance, start=start, end=end)) == "bad_times"


def test_too_short_and_too_long(tmp_path):
    assert reason(write(tmp_path / "a.wav", tone(0.09))) == "too_short"
    assert examine(write(tmp_path / "b.wav", tone(0.1)), AudioSection(), RATE)
    assert examine(write(tmp_path / "c.wav", tone(2)), AudioSection(max_seconds=2), RATE)
    long = write(tmp_path / "d.wav", tone(2.001))
    assert reason(long, max_seconds=2) == "too_long"
    assert reason(long, max_seconds=2, over_long="segment") == "too_long"
    assert examine(replace(long, end=1.5), AudioSection(max_seconds=2), RATE)[0].duration == 1.5


# ---------------------------------------------------------------------------------------------- cutting


def segmented(tmp_path: Path, *segments: tuple[float, float, str], text: str = "", seconds: float = 6) -> Utterance:
    utterance = write(tmp_path / "a.wav", tone(seconds))
    return replace(utterance, segments=tuple(Segment(*segment) for segment in segments), text=text, prompt="before")


def test_over_long_is_cut_at_segments(tmp_path):
    utterance = segmented(tmp_path, (0.5, 1.0, "a b"), (1.0, 2.0, "c"), (3.0, 4.5, "d"), (4.5, 5.0, " "), (5.0, 6, "e"))
    assert reason(replace(utterance), max_seconds=3) == "too_long"
    first, second = examine(replace(utterance, start=0.0), AudioSection(max_seconds=3, over_long="segment"), RATE)
    assert (first.start, first.end, first.duration, first.text) == (0.5, 2.0, 1.5, "a b c")
    assert (second.start, second.end, second.duration, second.text) == (3.0, 6.0, 3.0, "d e")
    assert second.segments == (Segment(0.0, 1.5, "d"), Segment(2.0, 3.0, "e"))
    assert (first.prompt, second.prompt) == ("before", None)
    assert read(second, RATE, "mean").shape == (3 * RATE,)


def test_cutting_a_piece_of_a_file_counts_from_the_piece(tmp_path):
    utterance = replace(segmented(tmp_path, (0, 1, "a"), (1.5, 2.5, "b")), start=2.0, end=4.5)
    pieces = examine(utterance, AudioSection(max_seconds=1, over_long="segment"), RATE)
    assert [(p.start, p.end, p.text, p.segments[0].start) for p in pieces] == [(2.0, 3.0, "a", 0), (3.5, 4.5, "b", 0)]


def test_overlapping_segments_stay_together(tmp_path):
    utterance = segmented(tmp_path, (2.5, 3.5, "c"), (0, 2, "a"), (1, 3, "b"))
    (piece,) = examine(utterance, AudioSection(max_seconds=4, over_long="segment"), RATE)
    assert (piece.start, piece.end, piece.text) == (0, 3.5, "a b c")
    assert reason(utterance, max_seconds=3, over_long="segment") == "too_long"


def test_texts_are_joined_as_the_row_joins_them(tmp_path):
    section = AudioSection(max_seconds=5, over_long="segment")
    for first, second, text in ((" One", " two.", "One two."), ("你", "好", "你好"), ("One", "two.", "One two.")):
        utterance = segmented(tmp_path, (0, 1, first), (1, 2, second), text=text)
        assert [piece.text for piece in examine(utterance, section, RATE)] == [text]


def test_segments_must_lie_within(tmp_path):
    for times in ((-0.5, 1), (1, 0.5), (1, 6.2), (float("nan"), 1)):
        assert reason(segmented(tmp_path, (*times, "a"))) == "bad_times"


def test_section_refuses_what_cannot_be():
    for wrong in ({"channel": -1}, {"channel": "left"}, {"min_seconds": 40}, {"silence_dbfs": 1}, {"max_seconds": 0}):
        with pytest.raises(ValidationError):
            AudioSection(**wrong)
