"""Embedding models and rerankers in the runtimes that serve them, in a process that does not know us."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # each starts the runtime that serves it in a process of its own

TEXTS = ["move the red ball", "now", "take a spoon today upstairs"]
PAIRS = [["red ball", "the red ball now"], ["lamp", "take"]]
LORA = ("model.lora.rank=4", "model.lora.target_modules=[query, value]")

TORCH = """
import sentence_transformers
rows = []
for folder, loader, texts in json.loads(sys.argv[1]):
    model = getattr(sentence_transformers, loader)(folder, device="cpu")
    if loader == "CrossEncoder":
        found = model.predict([tuple(pair) for pair in texts], activation_fn=torch.nn.Identity())
    elif loader == "MultiVectorEncoder":
        found = np.concatenate([np.asarray(row.cpu()) for row in model.encode(texts)])
    else:
        found = model.encode(texts, convert_to_tensor=True)
        found = found.to_dense() if found.is_sparse else found
    rows.append(np.asarray(found.cpu() if hasattr(found, "cpu") else found).tolist())
print(json.dumps(rows))
"""
GRAPHS = """
import onnxruntime
from tokenizers import Tokenizer
rows = []
for place, _, texts in json.loads(sys.argv[1]):
    folder = pathlib.Path(place)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    made = tokenizer.encode_batch([tuple(text) if isinstance(text, list) else text for text in texts])
    given = {"input_ids": [r.ids for r in made], "attention_mask": [r.attention_mask for r in made],
             "token_type_ids": [r.type_ids for r in made]}
    if (folder / "model.onnx").exists():
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        found = session.run(None, {one.name: np.array(given[one.name]) for one in session.get_inputs()})[0]
    else:
        import openvino
        options = {"INFERENCE_PRECISION_HINT": "f32"}
        model = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", options)
        found = model({one.get_any_name(): np.array(given[one.get_any_name()]) for one in model.inputs})[0]
    rows.append(found.tolist())
print(json.dumps(rows))
"""

# kind: (class of sentence-transformers, texts)
KINDS: dict[str, tuple[str, list[Any]]] = {
    "embedding.dense": ("SentenceTransformer", TEXTS),
    "embedding.sparse": ("SparseEncoder", TEXTS),
    "embedding.multi_vector": ("MultiVectorEncoder", TEXTS),
    "embedding.reranker": ("CrossEncoder", PAIRS),
}
GRAPHED = ("embedding.dense", "embedding.sparse", "embedding.reranker")


def ask(outside: Any, script: str, places: list[tuple[str, Any]]) -> list[np.ndarray]:
    """What models of these kinds make of the texts, all in one process."""
    jobs = [(str(place), *KINDS[kind]) for kind, place in places]
    return [np.array(row) for row in outside(script, json.dumps(jobs))]


@pytest.mark.serves("merged", "embedding.dense", "sentence-transformers")
@pytest.mark.serves("merged", "embedding.sparse", "sentence-transformers")
@pytest.mark.serves("merged", "embedding.multi_vector", "sentence-transformers")
@pytest.mark.serves("merged", "embedding.reranker", "sentence-transformers")
def test_merged(exported, checkpoint_of, outside) -> None:
    """As sentence-transformers makes it of the checkpoint itself."""
    places = []
    for kind in KINDS:
        place, report = exported(kind, "merged")
        assert report["usable"], kind
        places += [(kind, place), (kind, checkpoint_of(kind) / "model")]
    rows = ask(outside, TORCH, places)
    for at, kind in enumerate(KINDS):
        np.testing.assert_allclose(rows[2 * at], rows[2 * at + 1], atol=1e-5, err_msg=kind)


@pytest.mark.serves("adapter", "embedding.dense", "sentence-transformers")
@pytest.mark.serves("adapter", "embedding.reranker", "sentence-transformers")
@pytest.mark.parametrize("kind", ["embedding.dense", "embedding.reranker"])
def test_the_adapter_alone_and_merged(kind: str, exported, outside) -> None:
    """The adapter's folder, which says what its base is, gives what the merged model gives."""
    place, report = exported(kind, "adapter", *LORA)
    assert report["usable"]
    merged, report = exported(kind, "merged", *LORA)
    assert report["usable"]
    assert not (merged / "adapter_config.json").exists()
    found, expected = ask(outside, TORCH, [(kind, place), (kind, merged)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_sparse_adapter_is_merged(exported) -> None:
    """sentence-transformers does not load it by itself: the comparison with the trained model is all there is."""
    place, report = exported("embedding.sparse", "merged", *LORA)
    assert report["usable"]
    assert not (place / "adapter_config.json").exists()


@pytest.mark.serves("onnx", "embedding.dense", "onnxruntime")
@pytest.mark.serves("onnx", "embedding.sparse", "onnxruntime")
@pytest.mark.serves("onnx", "embedding.reranker", "onnxruntime")
@pytest.mark.serves("openvino", "embedding.dense", "OpenVINO")
@pytest.mark.serves("openvino", "embedding.sparse", "OpenVINO")
@pytest.mark.serves("openvino", "embedding.reranker", "OpenVINO")
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_graphs(format: str, exported, checkpoint_of, outside) -> None:
    """By tokenizers and the runtime alone, padded, for other sizes than the graph was made with."""
    if format == "openvino":
        pytest.importorskip("openvino")
    places, models = [], []
    for kind in GRAPHED:
        place, report = exported(kind, format)
        assert report["usable"], kind
        assert 0 < report["largest_difference"] <= report["allowed_difference"], kind
        assert not list(place.glob("*.safetensors")), "the weights are in the graph"
        places.append((kind, place))
        models.append((kind, checkpoint_of(kind) / "model"))
    for kind, found, expected in zip(GRAPHED, ask(outside, GRAPHS, places), ask(outside, TORCH, models), strict=True):
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-4, err_msg=kind)


def test_onnx_in_8_bits_is_smaller_and_evaluated_again(exported, outside) -> None:
    whole, _ = exported("embedding.dense", "onnx")
    place, report = exported("embedding.dense", "onnx", dtype="int8")
    assert report["usable"]
    assert report["largest_difference"] > 1e-4
    assert report["metrics"][report["deciding_metric"]]["artifact"] is not None
    assert (place / "model.onnx").stat().st_size < (whole / "model.onnx").stat().st_size
    found, expected = ask(outside, GRAPHS, [("embedding.dense", place), ("embedding.dense", whole)])
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(1) / norms).min() > 0.98


def test_openvino_in_16_bits(exported) -> None:
    pytest.importorskip("openvino")
    whole, _ = exported("embedding.dense", "openvino")
    place, report = exported("embedding.dense", "openvino", dtype="float16")
    assert report["usable"]
    assert report["largest_difference"] > 0
    assert (place / "openvino_model.bin").stat().st_size < 0.7 * (whole / "openvino_model.bin").stat().st_size
