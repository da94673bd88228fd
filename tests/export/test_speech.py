"""Whisper in the runtimes that serve it, in a process that does not know us."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

TRAINED = ("train.steps=60", "optim.learning_rate=2e-3", "model.audio_context=dynamic")
LORA = ("train.steps=20", "optim.learning_rate=2e-2", "model.lora.rank=4", "model.audio_context=dynamic")

HEAD = """
import soundfile
from transformers import WhisperForConditionalGeneration, WhisperProcessor
names = ["startoftranscript", "en", "transcribe", "notimestamps"]

def asked(folder):
    processor = WhisperProcessor.from_pretrained(folder)
    waves = [soundfile.read(name, dtype="float32")[0] for name in json.loads(sys.argv[3])]
    mel = processor(waves, sampling_rate=16000, return_tensors="pt").input_features
    return waves, mel, processor.tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names]), processor.tokenizer

def greedy(model, mel, prompt):
    rows = []
    with torch.no_grad():
        for one in mel:
            encoded, ids = model.model.encoder(one[None]), list(prompt)
            while len(ids) < 24 and ids[-1] != model.config.eos_token_id:
                given = {"encoder_outputs": encoded, "decoder_input_ids": torch.tensor([ids]), "use_cache": False}
                ids.append(int(model(**given).logits[0, -1].argmax()))
            rows.append([token for token in ids[len(prompt) :] if token != model.config.eos_token_id])
    return rows
"""
CTRANSLATE2 = (
    HEAD
    + """
import ctranslate2
waves, mel, prompt, _ = asked(sys.argv[2])
model = ctranslate2.models.Whisper(sys.argv[1], device="cpu", compute_type="float32")
found = model.generate(ctranslate2.StorageView.from_array(mel.numpy()), [prompt] * len(mel), beam_size=1, max_length=40)
whole = WhisperForConditionalGeneration.from_pretrained(sys.argv[2]).eval()
print(json.dumps([[row.sequences_ids[0] for row in found], greedy(whole, mel, prompt)]))
"""
)
FASTER = (
    HEAD
    + """
from faster_whisper import WhisperModel
from faster_whisper.audio import pad_or_trim
from faster_whisper.tokenizer import Tokenizer
waves, _, _, tokenizer = asked(sys.argv[2])
model = WhisperModel(sys.argv[1], device="cpu", compute_type="float32", cpu_threads=1)
spoken = Tokenizer(model.hf_tokenizer, model.model.is_multilingual, "transcribe", "en")
prompt = model.get_prompt(spoken, [], without_timestamps=True)
options = {"language": "en", "beam_size": 1, "temperature": 0.0, "without_timestamps": True, "suppress_tokens": None,
           "suppress_blank": False, "max_new_tokens": 20, "condition_on_previous_text": False,
           "no_speech_threshold": None, "log_prob_threshold": None, "compression_ratio_threshold": None}
found = [" ".join(part.text.strip() for part in model.transcribe(wave, **options)[0]) for wave in waves]
# The model hears the same features: faster-whisper makes its own, and pads them in another way.
mel = [torch.from_numpy(pad_or_trim(model.feature_extractor(wave)[:, :-1])) for wave in waves]
whole = WhisperForConditionalGeneration.from_pretrained(sys.argv[2]).eval()
expected = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in greedy(whole, mel, prompt)]
print(json.dumps([found, expected]))
"""
)
LOGITS = (
    HEAD
    + """
waves, mel, prompt, _ = asked(sys.argv[1])
model = WhisperForConditionalGeneration.from_pretrained(sys.argv[2])
if sys.argv[1] != sys.argv[2]:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, sys.argv[1]).get_base_model()
with torch.no_grad():
    ids = torch.tensor([prompt] * len(mel))
    print(json.dumps(model.eval()(input_features=mel, decoder_input_ids=ids).logits.tolist()))
"""
)


@pytest.fixture(scope="module")
def waves(checkpoint_of) -> str:
    """Recordings of 0.6 to 0.9 s, as JSON."""
    folder = checkpoint_of("asr.whisper", *TRAINED).parents[2]
    return json.dumps([str(folder / f"{number}.wav") for number in range(3)])


def same(found: list, expected: list) -> None:
    assert found == expected
    assert sum(bool(one) for one in found) >= 2, "a text that is empty proves nothing"


@pytest.mark.serves("merged", "asr.whisper", "transformers")
@pytest.mark.serves("ctranslate2", "asr.whisper", "CTranslate2")
@pytest.mark.slow
@pytest.mark.parametrize("changes", [TRAINED, LORA], ids=["whole", "lora"])
def test_ctranslate2(changes: tuple[str, ...], exported, outside, waves) -> None:
    place, report = exported("asr.whisper", "ctranslate2", *changes)
    assert report["usable"]
    assert report["same_text"] == report["inputs"] == 4
    assert report["largest_difference"] <= report["allowed_difference"] <= report["largest_number"] * 2**-13
    assert set(report["metrics"]["wer"]) == {"trained", "artifact", "better"}
    whole, _ = exported("asr.whisper", "merged", *changes)
    same(*outside(CTRANSLATE2, place, whole, waves))
    for name in ("model.bin", "config.json", "vocabulary.json", "tokenizer.json", "preprocessor_config.json"):
        assert (place / name).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_ctranslate2_smaller(dtype: str, exported) -> None:
    """Weights take less room, and the artifact is evaluated again."""
    sizes = {}
    for number in ("float32", dtype):
        place, report = exported("asr.whisper", "ctranslate2", *TRAINED, dtype=number)
        assert report["dtype"] == number
        assert report["usable"]
        assert report["metrics"]["wer"]["artifact"] is not None
        sizes[number] = (place / "model.bin").stat().st_size
    assert sizes[dtype] < 0.6 * sizes["float32"]


@pytest.mark.serves("ctranslate2", "asr.whisper", "faster-whisper")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_faster_whisper(dtype: str, exported, outside, waves) -> None:
    """It pads to 30 s whatever a model says, hence a toy of that context."""
    pytest.importorskip("faster_whisper")
    place, report = exported("asr.whisper", "ctranslate2", *TRAINED, dtype=dtype, model="whisper-30s")
    assert report["usable"]
    whole, _ = exported("asr.whisper", "merged", *TRAINED, model="whisper-30s")
    same(*outside(FASTER, place, whole, waves))


@pytest.mark.slow
@pytest.mark.serves("adapter", "asr.whisper", "PEFT")
def test_the_adapter_alone(exported, base_of, outside, waves) -> None:
    """With PEFT on the base it gives what the merged model gives, and not what the base gives."""
    place, report = exported("asr.whisper", "adapter", *LORA)
    assert report["usable"]
    whole, report = exported("asr.whisper", "merged", *LORA)
    assert report["usable"]
    expected = outside(LOGITS, whole, whole, waves)
    np.testing.assert_allclose(outside(LOGITS, place, base_of("whisper"), waves), expected, atol=1e-3)
    config = json.loads((Path(place) / "adapter_config.json").read_text())
    assert config["r"] == 4
