"""Long recordings: cut by voice activity, transcribed in pieces, scored as a whole, with times compared."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import soxr

from luthier.modalities.asr.long.cut import Voices, cut
from luthier.modalities.asr.long.join import joined
from luthier.modalities.asr.long.times import compared
from luthier.modalities.asr.metrics import Scored
from luthier.modalities.asr.sections import AudioSection, VoiceSection
from luthier.modalities.asr.utterance import Segment, Utterance


def rounded(pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(round(start, 3), round(end, 3)) for start, end in pieces]


def test_neighbouring_speech_stays_together_where_it_fits() -> None:
    """Pads are 0.2 s, or half of a shorter pause (0.2 s between 3 and 3.2, so 0.1 s each)."""
    spoken = [(1.0, 3.0), (3.2, 5.0), (8.0, 9.0)]
    assert rounded(cut(spoken, 10.0, 6.0, 0.2)) == [(0.8, 5.2), (7.8, 9.2)]
    assert rounded(cut(spoken, 10.0, 4.0, 0.2)) == [(0.8, 3.1), (3.1, 5.2), (7.8, 9.2)]
    assert rounded(cut(spoken, 10.0, 30.0, 0.2)) == [(0.8, 9.2)]


def test_where_nobody_speaks_the_whole_is_cut_evenly() -> None:
    assert rounded(cut([], 10.0, 4.0, 0.2)) == [(0.0, 3.333), (3.333, 6.667), (6.667, 10.0)]
    assert rounded(cut([(0.0, 9.0)], 9.0, 5.0, 0.2)) == [(0.0, 4.5), (4.5, 9.0)]


def test_pieces_are_scored_as_one_recording(caplog: pytest.LogCaptureFixture) -> None:
    """And one that lacks a piece is left out, which is said."""
    whole = Scored("so what now", " so ", "en", "a:1", part=(0, 1))
    parts = [Scored("one two three", text, "en", "b:1", part=(at, 3)) for at, text in enumerate(("one ", "", "three"))]
    chinese = [Scored("你好吗", text, "zh", "d:1", part=(at, 2)) for at, text in enumerate(("你", "好吗"))]
    with caplog.at_level(logging.WARNING, logger="luthier"):
        found = joined([whole, *parts, *chinese, Scored("x y", "x", "en", "c:1", part=(1, 2))])
    assert [(one.where, one.hypothesis) for one in found] == [("a:1", " so "), ("b:1", "one three"), ("d:1", "你好吗")]
    assert "1 long recordings are not scored" in caplog.text


def test_times_are_compared_word_by_word_where_both_have_them() -> None:
    """Reference: `hello there` 0 to 2 s and `friend` 3 to 4 s. Heard a little off, with one word wrong."""
    record = Scored(
        "Hello there, friend.",
        "hello bear friend",
        "en",
        "a:1",
        times=(Segment(0.1, 0.9, "hello"), Segment(1.0, 2.0, "bear"), Segment(3.3, 4.1, "friend")),
        segments=(Segment(0.0, 2.0, "Hello there,"), Segment(3.0, 4.0, "friend.")),
    )
    found = compared([record])
    # starts of `hello` (0.1) and `friend` (0.3); the end of `friend` (0.1): `there` was heard as another word
    assert found == pytest.approx({"start_error": 0.2, "end_error": 0.1, "timed": 3})
    assert compared([Scored("a", "a", "en", "b:1")]) == {}


def test_a_recording_is_cut_where_nobody_speaks(tmp_path: Path) -> None:
    """Three spoken sentences with 2 s of silence between them, which is where the cuts are."""
    pytest.importorskip("silero_vad")
    pytest.importorskip("espeakng_loader")
    from luthier.modalities.asr.demo.espeak import Engine

    speaker, rate = Engine(), 16000
    said = [
        speaker.say(text, "en", 150, 50) for text in ("the red ball is here", "put it down now", "well done my dear")
    ]
    said = [soxr.resample(wave, speaker.rate, rate) for wave in said]
    silence = np.zeros(2 * rate, np.float32)
    wave = np.concatenate([said[0], silence, said[1], silence, said[2]])
    sf.write(tmp_path / "long.wav", wave, rate)
    section = AudioSection(max_seconds=30, voice=VoiceSection(piece_seconds=3.0))
    pieces = Voices(section, rate).pieces(Utterance(str(tmp_path / "long.wav"), "text", "a:1"))
    assert [piece.part for piece in pieces] == [(at, len(pieces)) for at in range(len(pieces))]
    assert all((piece.duration or 9) <= 3.0 + 1e-6 for piece in pieces)
    first = len(said[0]) / rate
    second = first + 2 + len(said[1]) / rate
    quiet = [(first + 0.3, first + 1.7), (second + 0.3, second + 1.7)]  # the middles of the silences
    for begin, end in quiet:
        assert all((piece.end or 0) <= begin + 0.5 or piece.start >= end - 0.5 for piece in pieces)
    assert sum(piece.duration or 0 for piece in pieces) > 0.6 * sum(len(one) for one in said) / rate
    assert all(piece.whole is not None and piece.whole.text == "text" for piece in pieces)
