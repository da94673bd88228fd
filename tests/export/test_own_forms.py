"""Recognisers in the form of their own toolkit, which reads them in a process that does not know us."""

from __future__ import annotations

import json

import pytest

PARAFORMER = ("train.steps=80", "optim.learning_rate=3e-3")
NEMO = ("train.steps=100", "optim.learning_rate=1e-2", "model.vocabulary=data")

FUNASR = """
from funasr import AutoModel
model = AutoModel(model=sys.argv[1], device="cpu", ncpu=1, disable_update=True, disable_pbar=True)
print(json.dumps([model.generate(input=name)[0].get("text", "") for name in sys.argv[2:]]))
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


@pytest.mark.serves("nemo", "asr.nemo", "NeMo")
@pytest.mark.slow
def test_nemo(exported, checkpoint_of, outside) -> None:
    pytest.importorskip("nemo")
    proven("asr.nemo", "nemo", NEMO, RESTORED, exported, checkpoint_of, outside)
