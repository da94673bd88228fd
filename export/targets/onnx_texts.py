"""Embedding models and rerankers as one ONNX graph, from tokens to what is served: pooling and norm are part of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common.errors import ExportError
from ..graph import Session, quantise
from ..graph import write as write_graph
from ..source import Source
from .merged import WEIGHTS

needs_whole = True
FILE = "model.onnx"
LOADERS = {"embedding": "SentenceTransformer", "sparse": "SparseEncoder", "reranker": "CrossEncoder"}
FEATURES = {"embedding": "sentence_embedding", "sparse": "sentence_embedding", "reranker": "scores"}


class Whole(nn.Module):
    """All modules of a model of sentence-transformers as one function of tensors."""

    def __init__(self, parts: Any, feature: str):
        super().__init__()
        self.feature = feature
        self.parts = nn.ModuleList(Splade(part) if type(part).__name__ == "SpladePooling" else part for part in parts)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """The feature [B, D] of padded texts [B, T]."""
        first = self.parts[0]
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            given["token_type_ids"] = token_type_ids
        features: dict[str, Any] = first(dict(given))
        features["attention_mask"] = attention_mask
        for module in list(self.parts)[1:]:
            features = module(features)
        found: Tensor = features[self.feature]
        return found


class Splade(nn.Module):
    """SPLADE's pooling over all tokens at once; sentence-transformers' own goes over them in pieces, which would fix
    their number in a graph."""

    def __init__(self, pooling: Any):
        super().__init__()
        self.largest, self.twice = pooling.pooling_strategy == "max", pooling.activation_function == "log1p_relu"

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """As the pooling itself."""
        logits: Tensor = features["token_embeddings"]
        found = torch.log1p(torch.relu(logits * features["attention_mask"].unsqueeze(-1).to(logits.dtype)))
        found = torch.log1p(found) if self.twice else found
        return {**features, "sentence_embedding": found.amax(dim=1) if self.largest else found.sum(dim=1)}


def write(source: Source, directory: Path, dtype: str) -> None:
    """Write the graph, with tokenizer and settings beside it."""
    import sentence_transformers

    form = source.exportable.form
    options = {"attn_implementation": "eager"}  # its masks are plain arithmetic, which every runtime has
    model = getattr(sentence_transformers, LOADERS[form])(str(source.merged), device="cpu", model_kwargs=options)
    names = [name for name in model.tokenizer.model_input_names if name != "token_type_ids" or _has_types(model)]
    if form == "reranker" and len(list(model)) > 1:
        raise ExportError(
            "a reranker made of a causal language model pads at the left and is not exported as a graph",
            where="model.template",
            do="--to merged",
        )
    ids = torch.arange(1, 11).reshape(2, 5)
    examples = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    inputs = {name: examples[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in names}
    axes = {name: {0: "batch", 1: "tokens"} for name in inputs}
    shutil.copytree(source.merged, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS))
    write_graph(Whole(model, FEATURES[form]), inputs, [FEATURES[form]], axes, directory / FILE)
    if dtype == "int8":
        quantise(directory / FILE)


def _has_types(model: Any) -> bool:
    return getattr(model[0].model.config, "type_vocab_size", 0) > 0


class Runner:
    """The graph in onnxruntime."""

    def __init__(self, directory: Path):
        self.session = Session(directory / FILE)

    def __call__(self, ids: np.ndarray, mask: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
        """The feature [B, D] of padded texts [B, T]."""
        types = np.zeros_like(ids) if types is None else types
        found = self.session({"input_ids": ids, "attention_mask": mask, "token_type_ids": types})
        return next(iter(found.values()))


def runner(source: Source, directory: Path, dtype: str) -> Runner:
    """The artifact in onnxruntime."""
    return Runner(directory)
