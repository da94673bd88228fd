"""Whisper tuned on Italian telephone prompts makes as many errors in the runtime that serves it as it made in training.

Real speech and weights, which lie beside the clone: `pytest -m shared tests/export/test_italian.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luthier.common import reading
from luthier.common.checkpoint import directory
from luthier.common.training.run import train
from luthier.export.run import export
from luthier.modalities.asr.metrics import Scored, score

pytestmark = [pytest.mark.shared, pytest.mark.slow]

SHARED = Path(__file__).parents[3] / "shared"
PROMPTS = SHARED / "data" / "telephone-prompts"
WITHIN = 0.005
"""Largest difference of a normalised word error rate."""
MOST = 60
"""Tokens of a transcript: what the model repeats without end is cut here, in evaluation and by every runtime."""
PROMPT = 2
"""Tokens before it, of a model that knows only English: start of transcript, no timestamps."""

FASTER = """
import soundfile, soxr
from faster_whisper import WhisperModel
model = WhisperModel(sys.argv[1], device="cpu", compute_type="float32", cpu_threads=1)
options = {"language": "en", "beam_size": 1, "temperature": 0.0, "without_timestamps": True,
           "condition_on_previous_text": False, "no_speech_threshold": None, "log_prob_threshold": None,
           "compression_ratio_threshold": None, "max_new_tokens": int(sys.argv[3])}

def heard(name):
    wave, rate = soundfile.read(name, dtype="float32")
    wave = soxr.resample(wave, rate, 16000)
    wave = np.pad(wave, (0, 30 * 16000 - len(wave)))
    return " ".join(part.text.strip() for part in model.transcribe(wave, **options)[0])

print(json.dumps([heard(name) for name in json.loads(sys.argv[2])]))
"""


def kept(part: str) -> list[dict[str, Any]]:
    """The rows of up to 30 s in which somebody speaks, with whole paths."""
    lines = (PROMPTS / f"it.{part}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    spoken = [row for row in rows if row["duration"] < 30 and "silence" not in row["audio"]]
    return [{**row, "audio": str(PROMPTS / row["audio"])} for row in spoken]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a short tuning of all of Whisper's smallest English model."""
    folder = tmp_path_factory.mktemp("italian")
    for part in ("train", "validation"):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept(part)), encoding="utf-8")
    tree = {
        "task": {"kind": "asr.whisper"},
        "model": {"path": str(SHARED / "models" / "whisper-tiny.en"), "audio_context": "dynamic"},
        "data": {
            "train": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl"), "workers": 0,
            "batch": {"examples": 8},
        },
        "optim": {"learning_rate": 1e-4, "schedule": "linear", "warmup": 0.1},
        "train": {"steps": 100, "accelerator": "cpu", "devices": 1, "threads": 1},
        "evaluate": {"every": "never", "max_new_tokens": MOST},
        "checkpoint": {"every": None},
        "output": str(folder / "run"),
    }  # fmt: skip
    done = train(reading.build(tree, "italian.yaml"))
    return directory.committed(done.folder / "checkpoints")[-1]


def rate(texts: list[str]) -> float:
    """Normalised word error rate of what was heard of the evaluation set."""
    rows = kept("validation")
    items = [Scored(row["text"], text, row["language"]) for row, text in zip(rows, texts, strict=True)]
    return float(score(items)["wer"])


def same(tuned: Path, format: str, place: Path) -> float:
    """Error rate of the trained model, once the artifact's own is the same."""
    rates = json.loads((export(tuned, format, place, dtype="float32") / "parity.json").read_text())["metrics"]["wer"]
    assert rates["trained"] < 0.8, "a model that has learned nothing proves nothing"
    assert abs(rates["artifact"] - rates["trained"]) <= WITHIN
    return float(rates["trained"])


def test_faster_whisper(tuned: Path, outside: Callable[..., Any], tmp_path: Path) -> None:
    """On what the model has been trained on: recordings that soxr brought to 16 kHz, filled up with silence to 30 s.
    faster-whisper itself resamples by FFmpeg, which made 3 errors more in 340 words here, and fills the features of
    shorter ones with zeros, which are no silence. Of its `max_new_tokens` and the prompt together CTranslate2 gives a
    transcript half. In float32: in 8 bits one recording is repeated without end here and not there, which alone changes
    the rate by 0.08."""
    pytest.importorskip("faster_whisper")
    trained = same(tuned, "ctranslate2", tmp_path / "artifact")
    names = [row["audio"] for row in kept("validation")]
    heard = outside(FASTER, tmp_path / "artifact", json.dumps(names), 2 * MOST - PROMPT)
    assert abs(rate(heard) - trained) <= WITHIN


def test_onnx(tuned: Path, tmp_path: Path) -> None:
    """By onnxruntime, which the comparison of the export runs."""
    pytest.importorskip("onnxruntime")
    same(tuned, "onnx", tmp_path / "artifact")
