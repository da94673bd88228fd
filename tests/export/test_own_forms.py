"""Recognisers in the form of their own toolkit, which reads them in a process that does not know us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier.common.errors import ExportError
from luthier.export.source import Source
from luthier.export.targets import onnx_paraformer

PARAFORMER = ("train.steps=80", "optim.learning_rate=3e-3")
NEMO = ("train.steps=100", "optim.learning_rate=1e-2", "model.vocabulary=data")

FUNASR = """
from funasr import AutoModel
model = AutoModel(model=sys.argv[1], device="cpu", ncpu=1, disable_update=True, disable_pbar=True)
print(json.dumps([model.generate(input=name)[0].get("text", "") for name in sys.argv[2:]]))
"""
GRAPH = """
import onnxruntime, soundfile, torch, yaml
from funasr.frontends.wav_frontend import WavFrontend
from funasr.utils.load_utils import extract_fbank
folder = pathlib.Path(sys.argv[1])
session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
settings, means = yaml.safe_load((folder / "config.yaml").read_text())["frontend_conf"], folder / "am.mvn"
frontend = WavFrontend(cmvn_file=str(means) if means.exists() else None, **settings)
tokens, texts = json.loads((folder / "tokens.json").read_text()), []
for name in sys.argv[2:]:
    wave = torch.from_numpy(soundfile.read(name, dtype="float32")[0])
    speech, lengths = extract_fbank([wave], data_type="sound", frontend=frontend)
    scores, count = session.run(None, {"speech": speech.numpy(), "speech_lengths": lengths.int().numpy()})
    said = [tokens[one] for one in scores[0, : count[0]].argmax(-1)]
    texts.append(" ".join(one for one in said if one not in ("<blank>", "<s>", "</s>")))
print(json.dumps(texts))
"""
RESTORED = """
from nemo.collections.asr.models import ASRModel
model = ASRModel.restore_from(sys.argv[1] + "/model.nemo", map_location="cpu").eval()
print(json.dumps([one.text.strip() for one in model.transcribe(sys.argv[2:], batch_size=4, verbose=False)]))
"""


def proven(kind: str, format: str, changes: tuple[str, ...], script: str, exported, checkpoint_of, outside) -> None:
    """The artifact passes its comparison, and the toolkit writes of each recording what the trained model wrote."""
    checkpoint = checkpoint_of(kind, *changes)
    place, report = exported(kind, format, *changes)
    assert report["usable"]
    assert report["same_text"] == report["inputs"] == 4
    assert report["metrics"]["wer"]["artifact"] == report["metrics"]["wer"]["trained"]
    run = checkpoint.parents[1]
    said = json.loads(
        (run / "samples" / sorted(path.name for path in (run / "samples").glob("*.json"))[-1]).read_text()
    )
    samples = said if isinstance(said, list) else said["validation"]
    files = [str(run.parent / f"{int(one['where'].rpartition(':')[2]) - 1}.wav") for one in samples]
    expected = [one["hypothesis"] for one in samples]
    assert outside(script, place, *files) == expected
    assert sum(bool(text) for text in expected) >= 2, "a text that is empty proves nothing"


@pytest.mark.serves("funasr", "asr.paraformer", "FunASR")
@pytest.mark.slow
def test_funasr(exported, checkpoint_of, outside) -> None:
    pytest.importorskip("funasr")
    proven("asr.paraformer", "funasr", PARAFORMER, FUNASR, exported, checkpoint_of, outside)


@pytest.mark.serves("onnx", "asr.paraformer", "onnxruntime")
@pytest.mark.slow
def test_the_graph_that_funasr_writes(exported, checkpoint_of, outside) -> None:
    pytest.importorskip("funasr")
    proven("asr.paraformer", "onnx", PARAFORMER, GRAPH, exported, checkpoint_of, outside)
    _, report = exported("asr.paraformer", "onnx", *PARAFORMER)
    assert 0 < report["largest_difference"] <= report["allowed_difference"]


def test_a_graph_that_finds_no_token_says_nothing() -> None:
    """onnxruntime then fails, as FunASR's own runtimes know; any other failure is one."""
    states = pytest.importorskip("onnxruntime").capi.onnxruntime_pybind11_state
    runner = object.__new__(onnx_paraformer.Runner)

    def fails(error: Exception) -> Any:
        def session(given: dict[str, np.ndarray]) -> Any:
            assert given["speech_lengths"].tolist() == [7]
            raise error

        return session

    features = np.zeros((1, 7, 5), np.float32)
    runner.session = fails(states.RuntimeException("Reshape: 0 elements"))
    assert runner(features).shape[0] == 0
    runner.session = fails(ValueError("another"))
    with pytest.raises(ValueError, match="another"):
        runner(features)


def test_only_a_plain_paraformer_has_a_graph(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: SenseVoiceSmall\n")
    with pytest.raises(ExportError, match="plain"):
        onnx_paraformer.write(Source(None, tmp_path, tmp_path), tmp_path / "out", "float32")


@pytest.mark.serves("nemo", "asr.nemo", "NeMo")
@pytest.mark.slow
def test_nemo(exported, checkpoint_of, outside) -> None:
    pytest.importorskip("nemo")
    proven("asr.nemo", "nemo", NEMO, RESTORED, exported, checkpoint_of, outside)
