"""torchao's 8 bits, loaded by transformers in a process that does not know us."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # it starts the runtime that serves it in a process of its own

LOADED = """
from transformers import AutoModelForCausalLM
ids, found = torch.tensor([json.loads(sys.argv[1])]), []
for place in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(place, dtype="auto").eval()
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float().tolist()
    whole = weight.dequantize() if hasattr(weight, "dequantize") and "Int8" in type(weight).__name__ else weight
    found.append({"logits": logits, "kind": type(weight).__name__, "weight": whole.detach().float().tolist(),
                  "tied": model.lm_head.weight is model.model.embed_tokens.weight, "dtype": str(model.dtype)})
print(json.dumps(found))
"""


@pytest.mark.serves("torchao", "llm.sft", "transformers")
def test_a_trained_llama(exported, outside) -> None:
    """A weight is off by half a step of its row at most, which is 1/127.5 of the row's largest number; bfloat16 rounds
    the scale and what is multiplied by it."""
    pytest.importorskip("torchao")
    place, report = exported("llm.sft", "torchao")
    assert report["dtype"] == "int8"
    assert report["usable"]
    assert 0 < report["largest_difference"] <= report["allowed_difference"]
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], abs=0.03)
    whole, _ = exported("llm.sft", "merged")
    found, expected = outside(LOADED, json.dumps(list(range(5, 25))), place, whole)
    assert (found["kind"], found["dtype"], found["tied"]) == ("Int8Tensor", "torch.bfloat16", True)
    weight, rounded = np.array(expected["weight"]), np.array(found["weight"])
    largest = np.abs(weight).max(axis=1, keepdims=True)
    assert (np.abs(weight - rounded) <= largest * (0.5 / 127 + 3 * 2.0**-8)).all()
    scale = np.abs(expected["logits"]).max()
    assert 0 < np.abs(np.array(found["logits"]) - expected["logits"]).max() <= 2.0**-3 * scale
    assert json.loads((place / "config.json").read_text())["quantization_config"]["quant_method"] == "torchao"
    half, _ = exported("llm.sft", "merged", dtype="bfloat16")
    assert (place / "model.safetensors").stat().st_size < 0.8 * (half / "model.safetensors").stat().st_size
