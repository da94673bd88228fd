"""Embedding models and rerankers in the runtimes that serve them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from luthier.export.run import export

pytestmark = pytest.mark.slow  # each starts the runtime that serves it in a process of its own

TEXTS = ["move the red ball", "now", "take a spoon today upstairs"]
PAIRS = [["red ball", "the red ball now"], ["lamp", "take"]]
LORA = ("model.lora.rank=4", "model.lora.target_modules=[query, value]")

TORCH = """
import sentence_transformers
model = getattr(sentence_transformers, sys.argv[2])(sys.argv[1], device="cpu")
texts = json.loads(sys.argv[3])
if sys.argv[2] == "CrossEncoder":
    found = model.predict([tuple(pair) for pair in texts], activation_fn=torch.nn.Identity())
elif sys.argv[2] == "MultiVectorEncoder":
    found = np.concatenate([np.asarray(row.cpu()) for row in model.encode(texts)])
else:
    found = model.encode(texts, convert_to_tensor=True)
    found = found.to_dense() if found.is_sparse else found
print(json.dumps(np.asarray(found.cpu() if hasattr(found, "cpu") else found).tolist()))
"""
ONNX = """
import onnxruntime
from tokenizers import Tokenizer
folder = pathlib.Path(sys.argv[1])
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.enable_padding()
rows = tokenizer.encode_batch([tuple(text) if isinstance(text, list) else text for text in json.loads(sys.argv[2])])
session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
given = {"input_ids": [r.ids for r in rows], "attention_mask": [r.attention_mask for r in rows],
         "token_type_ids": [r.type_ids for r in rows]}
given = {one.name: np.array(given[one.name]) for one in session.get_inputs()}
found = session.run(None, given)[0]
print(json.dumps(found.tolist()))
"""

# kind: (class of sentence-transformers, texts)
KINDS = {
    "embedding.dense": ("SentenceTransformer", TEXTS),
    "embedding.sparse": ("SparseEncoder", TEXTS),
    "embedding.multi_vector": ("MultiVectorEncoder", TEXTS),
    "embedding.reranker": ("CrossEncoder", PAIRS),
}


@pytest.mark.parametrize(
    ("kind", "lora"),
    [(kind, lora) for kind in KINDS for lora in (False, True) if (kind, lora) != ("embedding.multi_vector", True)],
)  # a multi-vector model trains no adapter, as its last layer would be lost
def test_merged(kind: str, lora: bool, checkpoint_of, outside, tmp_path: Path) -> None:
    """As sentence-transformers makes it of the checkpoint itself, there with the adapter beside the base."""
    loader, texts = KINDS[kind]
    checkpoint = checkpoint_of(kind, *(LORA if lora else ()))
    place = export(checkpoint, "merged", tmp_path / "out", inputs=3)
    assert json.loads((place / "parity.json").read_text())["usable"]
    assert not (place / "adapter_config.json").exists()
    found = outside(TORCH, place, loader, json.dumps(texts))
    if lora and kind != "embedding.dense":  # the others don't load an adapter by themselves: parity is all there is
        return
    np.testing.assert_allclose(found, outside(TORCH, checkpoint / "model", loader, json.dumps(texts)), atol=1e-5)


def test_the_adapter_alone(checkpoint_of, outside, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("embedding.dense", *LORA)
    place = export(checkpoint, "adapter", tmp_path / "out", inputs=3)
    report = json.loads((place / "parity.json").read_text())
    assert report["usable"]
    found = outside(TORCH, place, "SentenceTransformer", json.dumps(TEXTS))
    merged = export(checkpoint, "merged", tmp_path / "merged", inputs=1)
    np.testing.assert_allclose(found, outside(TORCH, merged, "SentenceTransformer", json.dumps(TEXTS)), atol=1e-5)


@pytest.mark.parametrize("kind", ["embedding.dense", "embedding.sparse", "embedding.reranker"])
def test_onnx(kind: str, checkpoint_of, outside, tmp_path: Path) -> None:
    """By tokenizers and onnxruntime alone, padded, for other sizes than the graph was made with."""
    loader, texts = KINDS[kind]
    checkpoint = checkpoint_of(kind)
    place = export(checkpoint, "onnx", tmp_path / "out", inputs=3)
    report = json.loads((place / "parity.json").read_text())
    assert report["usable"]
    assert 0 < report["largest_difference"] <= report["allowed_difference"]
    found = np.array(outside(ONNX, place, json.dumps(texts)))
    expected = np.array(outside(TORCH, checkpoint / "model", loader, json.dumps(texts)))
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-4)
    assert not list(place.glob("*.safetensors")), "the weights are in the graph"


def test_onnx_in_8_bits_is_smaller_and_evaluated_again(checkpoint_of, outside, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("embedding.dense")
    whole = export(checkpoint, "onnx", tmp_path / "whole", inputs=2)
    place = export(checkpoint, "onnx", tmp_path / "out", dtype="int8", inputs=2)
    report = json.loads((place / "parity.json").read_text())
    assert report["usable"]
    assert report["largest_difference"] > 1e-4
    assert report["metrics"][report["deciding_metric"]]["artifact"] is not None
    assert (place / "model.onnx").stat().st_size < (whole / "model.onnx").stat().st_size
    found, expected = (np.array(outside(ONNX, one, json.dumps(TEXTS))) for one in (place, whole))
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(1) / norms).min() > 0.98
