"""The whole model, adapters merged, as its own library loads it in a process that does not know us."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from luthier.export.run import export

LOGITS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
if len(sys.argv) > 3:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, sys.argv[3]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[3] if len(sys.argv) > 3 else sys.argv[1])
ids = torch.tensor([tokenizer(sys.argv[2]).input_ids])
with torch.no_grad():
    print(json.dumps({"logits": model(input_ids=ids).logits[0].float().tolist(), "dtype": str(model.dtype)}))
"""

TEXT = "move the red ball now"


@pytest.mark.parametrize("kind", ["llm.sft", "llm.pretrain", "llm.dpo"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_language_model(kind: str, lora: bool, checkpoint_of, base_of, outside, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(kind, *(["model.lora.rank=4"] if lora else []))
    place = export(checkpoint, "merged", tmp_path / "out", inputs=3)
    report = json.loads((place / "parity.json").read_text())
    assert report["usable"]
    assert report["largest_difference"] <= report["allowed_difference"] < 0.01
    assert report["inputs"] == report["same_text"]
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], rel=1e-4)
    found = outside(LOGITS, place, TEXT)["logits"]
    model = checkpoint / "model"
    expected = outside(LOGITS, base_of("llm"), TEXT, model) if lora else outside(LOGITS, model, TEXT)
    np.testing.assert_allclose(found, expected["logits"], atol=1e-4)
    untouched = outside(LOGITS, base_of("llm"), TEXT)["logits"]
    assert np.abs(np.array(found) - untouched).max() > 0.01


# ------------------------------------------------------------------------------------------------ fault 20


HEAD = ("model.lora.rank=4", "model.lora.target_modules=[q_proj, lm_head]")


@pytest.mark.parametrize(
    ("overrides", "is_tied"),
    [
        (("model.lora.rank=4", "model.lora.target_modules=[q_proj]"), True),
        (HEAD, False),
        (("model.lora.rank=4", "model.lora.target_modules=[q_proj]", "model.lora.modules_to_save=[lm_head]"), False),
        (("model.lora.rank=4", "model.lora.target_modules=[q_proj, embed_tokens]"), False),
        (("model.lora.rank=4", "model.new_tokens=['<|note|>']"), True),
    ],
    ids=["plain", "lora on the output layer", "the output layer whole", "lora on the token table", "new tokens"],
)
def test_tied_embeddings_are_merged_right(
    overrides: tuple[str, ...], is_tied: bool, checkpoint_of, outside, tmp_path: Path
) -> None:
    """In a model whose output layer is its token table: an adapter of one of the two leaves the other as it was."""
    from safetensors.torch import load_file

    place = export(checkpoint_of("llm.sft", *overrides), "merged", tmp_path / "out", inputs=4)
    report = json.loads((place / "parity.json").read_text())
    assert report["usable"]
    assert report["largest_difference"] < 1e-4 * report["largest_number"]
    config = json.loads((place / "config.json").read_text())
    assert config["tie_word_embeddings"] is is_tied
    tensors = load_file(place / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not is_tied
    assert config["vocab_size"] == len(tensors["model.embed_tokens.weight"])
    found = outside(LOGITS, place, TEXT)
    assert found["dtype"] == "torch.float32"
    assert np.isfinite(found["logits"]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_number_formats(dtype: str, checkpoint_of, outside, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llm.sft")
    place = export(checkpoint, "merged", tmp_path / "out", dtype=dtype, inputs=3)
    report = json.loads((place / "parity.json").read_text())
    assert report["usable"]
    assert 0 < report["largest_difference"] <= report["allowed_difference"]
    assert outside(LOGITS, place, TEXT)["dtype"] == f"torch.{dtype}", "a loader without options takes it as it is"


def test_the_adapter_alone(checkpoint_of, base_of, outside, tmp_path: Path) -> None:
    """With PEFT on the base it gives what the merged model gives."""
    checkpoint = checkpoint_of("llm.sft", "model.lora.rank=4")
    place = export(checkpoint, "adapter", tmp_path / "out", inputs=3)
    assert json.loads((place / "parity.json").read_text())["usable"]
    merged = export(checkpoint, "merged", tmp_path / "merged", inputs=1)
    found, expected = outside(LOGITS, base_of("llm"), TEXT, place), outside(LOGITS, merged, TEXT)
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-4)
