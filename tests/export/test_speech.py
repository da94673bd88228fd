"""Whisper in the runtimes that serve it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from luthier.export.run import export

pytestmark = pytest.mark.slow  # each starts the runtime that serves it in a process of its own

CTRANSLATE2 = """
import ctranslate2
model = ctranslate2.models.Whisper(sys.argv[1], device="cpu", compute_type=sys.argv[3])
given = np.load(sys.argv[2])
view = ctranslate2.StorageView.from_array(given["features"])
found = model.generate(view, given["prompts"].tolist(), beam_size=1, max_length=40)
print(json.dumps([result.sequences_ids[0] for result in found]))
"""
EXPECTED = """
from transformers import WhisperForConditionalGeneration
given = np.load(sys.argv[2])
model = WhisperForConditionalGeneration.from_pretrained(sys.argv[1]).eval()
ids, end = torch.from_numpy(given["prompts"]), model.config.eos_token_id
begin, config = ids.shape[1], model.generation_config
with torch.no_grad():
    encoded = model.model.encoder(torch.from_numpy(given["features"]))
    for step in range(20):  # CTranslate2 writes at most half of its max_length
        logits = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits[:, -1]
        logits[:, [*(config.suppress_tokens or []), *((config.begin_suppress_tokens or []) if not step else [])]] = -1e9
        ids = torch.cat([ids, logits.argmax(1, keepdim=True)], 1)
rows = [row[begin:].tolist() for row in ids]
print(json.dumps([row[: row.index(end)] if end in row else row for row in rows]))
"""


@pytest.fixture(scope="module")
def asked(base_of, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mel features of tones, and the decoder's prompt, as arrays."""
    from transformers import WhisperFeatureExtractor, WhisperTokenizer

    extractor = WhisperFeatureExtractor.from_pretrained(base_of("whisper"))
    tokenizer = WhisperTokenizer.from_pretrained(base_of("whisper"))
    clock = np.arange(16000) / 16000
    waves = [0.2 * np.sin(2 * np.pi * pitch * clock) for pitch in (300, 700, 1500)]
    features = extractor(waves, sampling_rate=16000, return_tensors="np").input_features
    names = ("startoftranscript", "en", "transcribe", "notimestamps")
    prompt = tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
    file = tmp_path_factory.mktemp("asked") / "asked.npz"
    np.savez(file, features=features, prompts=np.array([prompt] * len(waves)))
    return file


@pytest.mark.parametrize("lora", [False, True])
def test_ctranslate2(lora: bool, checkpoint_of, asked, outside, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("asr.whisper", *(["model.lora.rank=4"] if lora else []))
    place = export(checkpoint, "ctranslate2", tmp_path / "out", inputs=4)
    report = json.loads((place / "parity.json").read_text())
    assert report["usable"]
    assert report["same_text"] == report["inputs"] == 4
    assert report["largest_difference"] <= report["allowed_difference"] <= report["largest_number"] * 2**-13
    assert set(report["metrics"]["wer"]) == {"trained", "artifact", "better"}
    whole = export(checkpoint, "merged", tmp_path / "whole", inputs=1)
    assert outside(CTRANSLATE2, place, asked, "float32") == outside(EXPECTED, whole, asked)
    for name in ("model.bin", "config.json", "vocabulary.json", "tokenizer.json", "preprocessor_config.json"):
        assert (place / name).is_file()


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_ctranslate2_smaller(dtype: str, checkpoint_of, tmp_path: Path) -> None:
    """Weights take less room, and the artifact is evaluated again."""
    checkpoint = checkpoint_of("asr.whisper")
    sizes = {}
    for number in ("float32", dtype):
        place = export(checkpoint, "ctranslate2", tmp_path / number, dtype=number, inputs=2)
        report = json.loads((place / "parity.json").read_text())
        assert report["dtype"] == number
        assert report["usable"]
        assert report["metrics"]["wer"]["artifact"] is not None
        sizes[number] = (place / "model.bin").stat().st_size
    assert sizes[dtype] < 0.6 * sizes["float32"]
