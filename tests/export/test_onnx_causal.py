"""Language models as ONNX graphs, run by onnxruntime and the package tokenizers in a process that does not know us."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.errors import ExportError
from luthier.export.source import Source
from luthier.export.targets import onnx_causal

TRAINED = ("train.steps=60", "optim.learning_rate=3e-3")
PROMPTS = ("move the red ball now", "take a lamp", "the spoon upstairs today drop a")

TORCH = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), AutoTokenizer.from_pretrained(sys.argv[1])
texts, logits = [], []
for prompt in sys.argv[2:]:
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        logits.append(model(ids).logits[0].tolist())
        made = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    texts.append(tokenizer.decode(made, skip_special_tokens=True))
print(json.dumps({"texts": texts, "logits": logits}))
"""
ONNX = """
import onnxruntime
from tokenizers import Tokenizer
folder = pathlib.Path(sys.argv[1])
session = onnxruntime.InferenceSession(folder / "model.onnx")
tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
ends = np.atleast_1d(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])
past = [one for one in session.get_inputs() if one.name.startswith("past_key_values")]
names = [one.name for one in session.get_outputs()]

def step(ids, mask, cache):
    places = np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": places, **cache}
    found = dict(zip(names, session.run(None, given)))
    return found.pop("logits"), {name.replace("present", "past_key_values"): one for name, one in found.items()}

def answers(prompts):
    rows, longest = [tokenizer.encode(one, add_special_tokens=False).ids for one in prompts], 0
    longest = max(map(len, rows))
    ids = np.array([[0] * (longest - len(row)) + row for row in rows])
    mask = np.array([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    cache = {one.name: np.zeros((len(rows), one.shape[1], 0, one.shape[3]), np.float32) for one in past}
    made, first = [], None
    for _ in range(16):
        logits, cache = step(ids, mask, cache)
        first = logits if first is None else first
        ids = logits[:, -1].argmax(-1)[:, None]
        made.append(ids)
        mask = np.concatenate([mask, np.ones_like(ids)], 1)
    made = np.concatenate(made, 1).tolist()
    kept = [row[: next((at for at, one in enumerate(row) if one in ends), len(row))] for row in made]
    return [tokenizer.decode(row) for row in kept], first

alone = [answers([prompt]) for prompt in sys.argv[2:]]
print(json.dumps({"texts": [one[0][0] for one in alone], "logits": [one[1][0].tolist() for one in alone],
                  "together": answers(sys.argv[2:])[0]}))
"""


@pytest.mark.serves("onnx", "llm.sft", "onnxruntime")
@pytest.mark.slow
def test_a_tuned_model(exported, outside) -> None:
    """The same logits of prompts, and the same answers token by token from the cache, alone and padded in a batch."""
    place, report = exported("llm.sft", "onnx", *TRAINED)
    assert report["usable"]
    assert report["same_text"] == report["inputs"] == 4
    assert 0 < report["largest_difference"] <= report["allowed_difference"]
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], rel=1e-4)
    whole, _ = exported("llm.sft", "merged", *TRAINED)
    found, expected = outside(ONNX, place, *PROMPTS), outside(TORCH, whole, *PROMPTS)
    for one, other in zip(found["logits"], expected["logits"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
    assert found["texts"] == found["together"] == expected["texts"]
    assert len(set(found["texts"])) > 1, "the answers depend on the prompt"
    assert all(found["texts"]), "a text that is empty proves nothing"
    assert not list(place.glob("*.safetensors")), "the weights are in the graph"


@pytest.mark.slow
def test_in_8_bits(exported, outside) -> None:
    """The weights take less room, the artifact is evaluated again, and answers from the cache as from none."""
    whole, _ = exported("llm.sft", "onnx", *TRAINED)
    place, report = exported("llm.sft", "onnx", *TRAINED, dtype="int8")
    assert report["usable"]
    assert report["dtype"] == "int8"
    assert report["largest_difference"] > 1e-4
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], rel=0.03)
    assert (place / "model.onnx").stat().st_size < (whole / "model.onnx").stat().st_size
    assert all(outside(ONNX, place, *PROMPTS)["texts"])


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.2,
    "vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
SLIDING = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more"), [("Qwen3", {}), ("Qwen2", SLIDING), ("Gemma3Text", SLIDING)])
def test_each_family(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    """A prompt at once and token by token gives transformers' logits, past the window of layers that have one."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, f"{family}Config")(**SIZES, **more)).eval()
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "out").mkdir()
    onnx_causal.write(Source(SimpleNamespace(), tmp_path / "whole", tmp_path / "whole"), tmp_path / "out", "float32")
    ids = [7, 3, 9, 30, 4, 22, 5, 6, 31, 8, 2, 11]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    runner = onnx_causal.Runner(tmp_path / "out")
    atol = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(runner.logits(ids), expected, atol=atol)
    parts, cache, done = [], runner.empty, 0
    for part in (ids[:5], ids[5:7], *([token] for token in ids[7:])):
        logits, cache = runner._step(part, cache, done)
        parts.append(logits)
        done += len(part)
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=atol)


def test_models_that_remember_other_things_are_refused() -> None:
    config = hf.Qwen3NextConfig(**SIZES, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ExportError, match="linear_attention"):
        onnx_causal.state(SimpleNamespace(causal=SimpleNamespace(config=config)))
