"""CTC models as ONNX graphs, run by onnxruntime and by sherpa-onnx in a process that does not know us."""

from __future__ import annotations

import numpy as np
import pytest

CTC = ("train.steps=120", "optim.learning_rate=5e-3")
LORA = ("model.lora.rank=4", "model.lora.target_modules=[q_proj, v_proj]")

CTC_TORCH = """
from transformers import AutoModelForCTC, AutoProcessor
processor, adapter = AutoProcessor.from_pretrained(folder), folder / "adapter_config.json"
base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else folder
model = AutoModelForCTC.from_pretrained(base)
if adapter.exists():
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, folder).get_base_model()
model.eval()
with torch.no_grad():
    given = [processor(wave, sampling_rate=16000, return_tensors="pt") for wave in waves]
    name = processor.feature_extractor.model_input_names[0]
    logits = [model(one[name]).logits[0] for one in given]
texts = [processor.tokenizer.decode(one.argmax(-1)).strip() for one in logits]
print(json.dumps({"logits": [one.tolist() for one in logits], "texts": texts}))
"""
CTC_ONNX = """
import itertools, onnxruntime
session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
names = dict(reversed(line.split()) for line in (folder / "tokens.txt").read_text().splitlines())
given = [wave[None] for wave in waves]
if session.get_inputs()[0].shape[-1] == 160:
    from transformers import AutoFeatureExtractor
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    given = [extractor(wave, sampling_rate=16000, return_tensors="np")["input_features"] for wave in waves]
logits = [session.run(None, {"features": one})[0][0] for one in given]
best = [[names[str(label)] for label, _ in itertools.groupby(one.argmax(-1).tolist())] for one in logits]
texts = ["".join(row).replace("<blk>", "").replace("\\u2581", " ").strip() for row in best]
both = session.run(None, {"features": np.stack([one[0, :8000 if one.ndim == 2 else 20] for one in given[:2]])})[0]
print(json.dumps({"logits": [one.tolist() for one in logits], "texts": texts, "both": both.tolist()}))
"""
CTC_SHERPA = """
import sherpa_onnx
heard = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(f"{folder}/model.onnx", tokens=f"{folder}/tokens.txt")
print(json.dumps(written(heard)))
"""


@pytest.fixture(scope="module")
def waves(checkpoint_of) -> list[str]:
    """Recordings of 1 to 1.3 s, of those of the training."""
    folder = checkpoint_of("asr.ctc", *CTC).parents[2]
    return [str(folder / f"{number}.wav") for number in range(4, 8)]


@pytest.mark.serves("onnx", "asr.ctc", "onnxruntime")
@pytest.mark.slow
@pytest.mark.parametrize("model", ["ctc", "ctc-mel"])
def test_ctc(model: str, exported, outside_hearing, waves, same_texts) -> None:
    """From samples or mel features to the same logits and text, for other lengths than the graph was made with."""
    place, report = exported("asr.ctc", "onnx", *CTC, model=model)
    assert report["usable"]
    assert report["same_text"] == report["inputs"] == 4
    assert 0 < report["largest_difference"] <= report["allowed_difference"]
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], rel=1e-4)
    whole, _ = exported("asr.ctc", "merged", *CTC, model=model)
    found, expected = outside_hearing(CTC_ONNX, place, *waves), outside_hearing(CTC_TORCH, whole, *waves)
    for one, other in zip(found["logits"], expected["logits"], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
    same_texts(found["texts"], expected["texts"])
    assert np.shape(found["both"])[0] == 2
    assert not list(place.glob("*.safetensors")), "the weights are in the graph"


@pytest.mark.serves("onnx", "asr.ctc", "sherpa-onnx")
@pytest.mark.slow
def test_ctc_in_sherpa(exported, outside_hearing, waves, same_texts) -> None:
    pytest.importorskip("sherpa_onnx")
    place, _ = exported("asr.ctc", "onnx", *CTC)
    whole, _ = exported("asr.ctc", "merged", *CTC)
    same_texts(outside_hearing(CTC_SHERPA, place, *waves), outside_hearing(CTC_TORCH, whole, *waves)["texts"])


@pytest.mark.slow
@pytest.mark.serves("merged", "asr.ctc", "transformers")
@pytest.mark.serves("adapter", "asr.ctc", "PEFT")
def test_a_ctc_adapter_is_merged_and_served_alone(exported, outside_hearing, waves) -> None:
    """PEFT on the base gives what the merged model gives."""
    changes = (*LORA, "model.lora.modules_to_save=[lm_head]")
    merged, report = exported("asr.ctc", "merged", *changes)
    assert report["usable"]
    place, report = exported("asr.ctc", "adapter", *changes)
    assert report["usable"]
    found, expected = outside_hearing(CTC_TORCH, place, *waves), outside_hearing(CTC_TORCH, merged, *waves)
    np.testing.assert_allclose(found["logits"][0], expected["logits"][0], atol=1e-4)
