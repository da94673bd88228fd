"""The demonstration's speech and model: made on the spot, the same each time, and fit for training."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luthier.common.errors import DataError, LuthierError
from luthier.modalities.asr.demo.model import make_model
from luthier.modalities.asr.demo.prepare import prepare
from luthier.modalities.asr.demo.speech import UNHEARD_VOICE, VOICES, make_speech, sentences, synthesize

pytest.importorskip("espeakng_loader")

SENTENCE = "take the red box upstairs"
COUNTS = {"train": 24, "validation": 5, "test": 8}


def manifest(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def envelope(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """Mean magnitude spectrum, of unit length."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, 512)[::256]
    spectrum = np.abs(np.fft.rfft(frames * np.hanning(512))).mean(axis=0)
    return np.asarray(spectrum / np.linalg.norm(spectrum))


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    make_speech(folder, seed=1, **COUNTS)
    return folder


def test_speech_is_heard_and_takes_as_long_as_its_speed_says() -> None:
    (slow, rate), (fast, _) = (synthesize(SENTENCE, "en-us", wpm, 50) for wpm in (120, 240))
    assert slow.dtype == np.float32
    assert np.abs(slow).max() <= 1
    assert np.sqrt(np.mean(slow**2)) > 0.03
    assert 1.2 < len(slow) / rate < 2.8, "5 short words at 120 a minute: 2.5 s, or less"
    assert 0.4 < len(fast) / len(slow) < 0.8


def test_the_same_call_gives_the_same_samples_whatever_was_said_before() -> None:
    first, _ = synthesize(SENTENCE, "en-us+f3", 160, 50)
    synthesize("something else", "en-us+m3", 200, 30)
    again, _ = synthesize(SENTENCE, "en-us+f3", 160, 50)
    assert np.array_equal(first, again)


def test_every_voice_is_another() -> None:
    voices = [*VOICES, UNHEARD_VOICE]
    spectra = np.stack([envelope(synthesize(SENTENCE, voice, 160, 50)[0]) for voice in voices])
    likeness = spectra @ spectra.T - np.eye(len(voices))
    assert likeness.max() < 0.995, "1 is the same spectrum"


@pytest.mark.parametrize("voice", ["en-us+nobody", "nowhere", "nowhere+f3"])
def test_an_unknown_voice_is_refused_by_name(voice: str) -> None:
    with pytest.raises(DataError, match=re.escape(voice)):
        synthesize(SENTENCE, voice, 160, 50)


def test_a_missing_engine_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(LuthierError, match=r"luthier\[demo\]"):
        synthesize(SENTENCE, "en-us", 160, 50)


def test_manifests_agree_with_their_audio(speech: Path) -> None:
    for name, count in COUNTS.items():
        rows = manifest(speech, name)
        assert len(rows) == count
        for row in rows:
            assert set(row) == {"audio", "text", "language", "duration", "speaker"}
            with wave.open(str(speech / row["audio"])) as audio:
                assert (audio.getnchannels(), audio.getsampwidth()) == (1, 2)
                assert row["duration"] == pytest.approx(audio.getnframes() / audio.getframerate(), abs=1e-4)
                assert 0.5 < row["duration"] < 2.5
                samples = np.frombuffer(audio.readframes(audio.getnframes()), "<i2")
            assert samples.astype(float).std() > 150


def test_the_splits_share_no_sentence_and_one_voice_is_new_in_the_test(speech: Path) -> None:
    rows = {name: manifest(speech, name) for name in COUNTS}
    texts = {name: {row["text"] for row in part} for name, part in rows.items()}
    assert not texts["train"] & texts["test"]
    assert not texts["train"] & texts["validation"]
    assert not texts["validation"] & texts["test"]
    assert UNHEARD_VOICE in {row["speaker"] for row in rows["test"]}
    assert UNHEARD_VOICE not in {row["speaker"] for row in (*rows["train"], *rows["validation"])}


def test_training_has_every_word_of_the_test(tmp_path: Path) -> None:
    assert len(sentences()) == len(set(sentences())) == 5 * 5 * 6 * 5
    make_speech(tmp_path, seed=0, train=100, validation=5, test=5)
    words = {word for row in manifest(tmp_path, "train") for word in row["text"].split()}
    assert words == {word for text in sentences() for word in text.split()}


def test_speech_depends_on_the_seed_alone(speech: Path, tmp_path: Path) -> None:
    make_speech(tmp_path / "same", seed=1, **COUNTS)
    make_speech(tmp_path / "other", seed=2, **COUNTS)
    assert digests(tmp_path / "same") == digests(speech)
    assert digests(tmp_path / "other")["test.jsonl"] != digests(speech)["test.jsonl"]


def test_the_model_loads_and_spells_every_text(tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    make_model(tmp_path / "one", sentences(), seed=3)
    make_model(tmp_path / "two", sentences(), seed=3)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")

    tokenizer = WhisperProcessor.from_pretrained(tmp_path / "one").tokenizer
    start = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    for text in sentences():
        ids = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(ids[:4]) == start
        assert len(ids) == 4 + len(text.split()) + 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    unseen = "Ça va, 世界?"
    assert tokenizer.decode(tokenizer(unseen).input_ids, skip_special_tokens=True) == unseen

    model = WhisperForConditionalGeneration.from_pretrained(tmp_path / "one")
    known = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("en", "transcribe", "translate")}
    generation: Any = model.generation_config
    assert generation.lang_to_id == {"<|en|>": known["en"]}
    assert generation.task_to_id == {name: known[name] for name in ("transcribe", "translate")}
    assert generation.no_timestamps_token_id == tokenizer.convert_tokens_to_ids("<|notimestamps|>")
    assert model.config.vocab_size == len(tokenizer)


def test_the_model_transcribes_what_the_processor_hears(tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    make_model(tmp_path, sentences())
    processor = WhisperProcessor.from_pretrained(tmp_path)
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    features = processor(audio=np.zeros(16000, np.float32), sampling_rate=16000, return_tensors="pt").input_features
    assert features.shape == (1, 80, 2 * model.config.max_source_positions)
    ids = model.generate(input_features=features, language="en", task="transcribe")
    assert ids.shape[0] == 1
    assert ids.shape[1] <= model.config.max_target_positions


def test_what_is_prepared_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "luthier.modalities.asr.demo.prepare"
    few = {"train": 4, "validation": 2, "test": 2}
    monkeypatch.setattr(f"{module}.make_speech", lambda folder, seed: make_speech(folder, seed, **few))
    assert prepare(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert not prepare(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert prepare(tmp_path, seed=1), "another seed is another demonstration"


def test_an_interrupted_preparation_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    module = "luthier.modalities.asr.demo.prepare"
    few = {"train": 4, "validation": 2, "test": 2}
    monkeypatch.setattr(f"{module}.make_speech", lambda folder, seed: make_speech(folder, seed, **few))
    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.make_model", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path)
    assert prepare(tmp_path)
    assert (tmp_path / "model" / "config.json").is_file()
