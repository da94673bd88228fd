"""Mistakes that `luthier check` finds before Whisper is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

WORDS = ("one", "two", "three", "four", "five", "six")
ROWS = [{"text": word, "language": "en"} for word in WORDS]


def rows(**changes: Any) -> list[dict[str, Any]]:
    return [{**row, **changes} for row in ROWS]


# name: (rows, sections, what is said)
PLANTED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "audio that can't be decoded": (ROWS, {}, "1 corrupt_audio"),
    "audio that is missing": (ROWS, {}, "1 missing_file"),
    "silence": (ROWS, {}, "1 silent_audio"),
    "wrong rate": (rows(duration=2.0), {}, "6 wrong_duration"),
    "text too long": (rows(text="one two three " * 9), {}, "6 text_too_long"),
    "empty text": (rows(text=" "), {}, "6 empty_text"),
    "every text the same": (rows(text="one"), {}, "every recording has the same text"),
    "language unknown to the model": (rows(language="fr"), {}, "6 unknown_language"),
    "no language": ([{"text": word} for word in WORDS], {}, "6 no_language"),
    "column of another name": ([{"said": word, "language": "en"} for word in WORDS], {}, "6 no_text"),
    "recordings too short": (ROWS, {"data": {"audio": {"min_seconds": 3.0}}}, "6 too_short"),
    "recordings too long": (ROWS, {"data": {"audio": {"max_seconds": 0.4}}}, "6 too_long"),
    "bounds that exclude all": (ROWS, {"data": {"audio": {"min_seconds": 3.0, "max_seconds": 1.0}}}, "is above"),
    "adapter target": (ROWS, {"model": {"lora": {"target_modules": ["qkv"]}}}, "qkv"),
    "noise without its folder": (ROWS, {"data": {"augment": {"noise_probability": 0.5}}}, "needs"),
    "cache of varied audio": (
        ROWS, {"data": {"cache": {"folder": "cache"}, "augment": {"speed": [0.9, 1.1]}}}, "data.cache keeps features",
    ),
    "model of another kind": (ROWS, {"model": {"path": "EMPTY"}}, "can't be loaded"),
    "metric key": (ROWS, {"checkpoint": {"best": "accuracy"}}, "no such metric"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(
    name: str, multilingual, recipes, tone, write_manifest, failures, tmp_path: Path
) -> None:
    given, sections, said = PLANTED[name]
    waves = [tone(at, 0.6 + 0.1 * at) for at in range(len(given))]
    if name == "silence":
        waves[0] = np.zeros_like(waves[0])
    file = write_manifest(tmp_path, waves, given)
    if name == "audio that can't be decoded":
        (tmp_path / "0.wav").write_bytes(b"RIFF nothing")
    if name == "audio that is missing":
        (tmp_path / "0.wav").unlink()
    data = {"train": str(file), "workers": 0, **sections.get("data", {})}
    path = multilingual
    if sections.get("model", {}).get("path") == "EMPTY":
        (tmp_path / "empty").mkdir()
        path, sections = str(tmp_path / "empty"), {}
    make = recipes(file, tmp_path / "run", {"kind": "asr.whisper"})
    found = failures(lambda: make(path, **{**sections, "data": data}))
    assert any(said in one for one in found), found
    assert len(found) == 1, "one mistake is one failure"


def test_a_copy_of_a_training_recording_is_found_in_the_test_data(
    multilingual, recipes, tone, write_manifest, failures, tmp_path: Path
) -> None:
    waves = [tone(at, 0.6 + 0.1 * at) for at in range(6)]
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
    train = write_manifest(tmp_path / "train", waves, ROWS)
    test = write_manifest(tmp_path / "test", [tone(9, 1.0), waves[2]], [{"text": "nine", "language": "en"}, ROWS[2]])
    make = recipes(train, tmp_path / "run", {"kind": "asr.whisper"})
    data = {"train": str(train), "test": str(test), "workers": 0}
    (found,) = failures(lambda: make(multilingual, data=data))
    assert "data.test: 1 of 2 examples, such as" in found
    assert "rows.jsonl:2" in found
