"""Embedding models and rerankers for OpenVINO, from tokens to what is served, by way of the ONNX graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..graph import APART
from ..source import Source
from . import onnx_texts

needs_whole = True
FILE = "openvino_model.xml"


def write(source: Source, directory: Path, dtype: str) -> None:
    """Convert the graph; the weights are stored in `dtype`."""
    import openvino

    onnx_texts.write(source, directory, "float32")
    graph = directory / onnx_texts.FILE
    openvino.save_model(openvino.convert_model(graph), directory / FILE, compress_to_fp16=dtype == "float16")
    for file in (graph, graph.with_name(f"{graph.name}{APART}")):
        file.unlink(missing_ok=True)


class Runner:
    """The graph in OpenVINO, on the CPU."""

    def __init__(self, directory: Path):
        import openvino

        core = openvino.Core()
        self.model = core.compile_model(directory / FILE, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        self.inputs = [one.get_any_name() for one in self.model.inputs]

    def __call__(self, ids: np.ndarray, mask: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
        """The feature [B, D] of padded texts [B, T]."""
        types = np.zeros_like(ids) if types is None else types
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        found: np.ndarray = self.model({name: given[name] for name in self.inputs})[0]
        return np.array(found)


def runner(source: Source, directory: Path, dtype: str) -> Runner:
    """The artifact in OpenVINO."""
    return Runner(directory)
