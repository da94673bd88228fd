"""Forced alignment: words where the frames have them, segments that don't overlap, and a file that goes on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import torch

from luthier.common.errors import DataError
from luthier.modalities.asr import align
from luthier.modalities.asr.align import Settings, Word
from luthier.modalities.asr.utterance import Utterance

pytest.importorskip("torchaudio")


def test_words_are_where_the_frames_have_their_letters(
    make_task: Any, wav2vec2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that are sure of `_ab__|_c_`: `ab` stands in frames 1 to 3, `c` in frame 7."""
    task = make_task(wav2vec2).eval()
    labels = task.processing.labels
    a, b, c = (labels.known(letter)[0] for letter in "abc")
    path = [labels.blank, a, b, labels.blank, labels.blank, labels.space, labels.blank, c, labels.blank]
    scores = torch.full((len(path), len(task.processing.vocabulary.tokens)), math.log(0.001))
    scores[range(len(path)), path] = math.log(0.9)
    monkeypatch.setattr(align, "emissions", lambda *_: scores)
    found = align.aligned(task, np.zeros(1, np.float32), Utterance("x.wav", "ab, c!", "x:1"), "en", 30.0)
    seconds = task.processing.hearing.samples_per_frame / task.processing.hearing.rate
    assert [word.text for word in found] == ["ab,", "c!"]
    assert [word.start for word in found] == pytest.approx([1 * seconds, 7 * seconds])
    assert [word.end for word in found] == pytest.approx([3 * seconds, 8 * seconds])
    assert [word.frames for word in found] == [2, 1]


def test_segments_are_cut_at_the_longest_pause_and_share_what_lies_between() -> None:
    spoken = [Word(text, start, end, 0.0, 1) for text, start, end in (("a", 1, 2), ("b", 2.2, 3), ("c", 5, 6))]
    groups = align.cut(spoken, 3.0)
    assert [[word.text for word in group] for group in groups] == [["a", "b"], ["c"]]
    assert [[word.text for word in group] for group in align.cut(spoken, 0.5)] == [["a"], ["b"], ["c"]]
    assert [(start, end) for _, start, end in align.padded(groups, 6.1)] == [(0.7, 3.3), (4.7, 6.1)]
    close = align.padded([[spoken[0]], [spoken[1]]], 6.1)  # the pause of 0.2 s is halved
    assert [(round(start, 3), round(end, 3)) for _, start, end in close] == [(0.7, 2.1), (2.1, 3.3)]


def test_a_file_of_segments_goes_on_to_the_same_bytes(model_of: Any, tmp_path: Path) -> None:
    """Whole; repeated; after a kill that left a recording without its line and half of another."""
    texts = ["hello world how are you", "one two good day", "ciao bella"]
    wave = np.random.default_rng(0).standard_normal(16000 * 3).astype(np.float32) * 0.1
    rows = []
    for number, text in enumerate(texts):
        sf.write(tmp_path / f"{number}.wav", wave[: 16000 * (3 - number)], 16000)
        rows.append({"audio": str(tmp_path / f"{number}.wav"), "text": text})
    rows.append({"audio": str(tmp_path / "absent.wav"), "text": "nothing"})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(str(data), str(model_of("wav2vec2:group")), tmp_path / "segments.jsonl", max_seconds=1.0)
    report = align.align(settings)
    assert (report.recordings, report.aligned, sum(report.failed.values())) == (4, 3, 1)
    whole = settings.output.read_bytes()
    found = [json.loads(line) for line in whole.splitlines()]
    for number, text in enumerate(texts):
        mine = [row for row in found if row["audio"].endswith(f"{number}.wav")]
        assert " ".join(row["text"] for row in mine) == text
        assert all(0 <= row["start"] < row["end"] <= 3 - number + 0.001 for row in mine)
        assert all(one["end"] <= other["start"] + 0.001 for one, other in pairwise(mine))
        assert all(0 < row["confidence"] <= 1 for row in mine)
    assert align.align(settings).segments == report.segments == len(found)
    assert settings.output.read_bytes() == whole
    log = settings.output.with_name("segments.jsonl.progress")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:2]) + lines[2][:5])
    assert align.align(settings).segments == report.segments
    assert settings.output.read_bytes() == whole
    with pytest.raises(DataError, match="with other settings"):
        align.align(replace(settings, max_seconds=2.0))
