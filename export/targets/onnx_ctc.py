"""CTC models as one ONNX graph: of raw audio from samples on, which sherpa-onnx runs, else from mel features on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..graph import Session
from ..graph import write as write_graph
from ..source import Source
from .merged import WEIGHTS

needs_whole = True
FILE, TOKENS = "model.onnx", "tokens.txt"
BLANK, SPACE = "<blk>", "\u2581"
"""The names that sherpa-onnx knows them by."""


class Whole(nn.Module):
    """A CTC model as one function of a tensor.

    Args:
        ctc: transformers' model.
        normed: whether it hears samples of mean 0 and variance 1. That is part of the graph then, and changes nothing
            if a program has done it before.
    """

    def __init__(self, ctc: Any, normed: bool):
        super().__init__()
        self.ctc, self.normed = ctc, normed

    def forward(self, features: Tensor) -> Tensor:
        """Logits [B, T, V] of recordings of one length: samples [B, N], or features [B, T, F]."""
        if self.normed:
            middle, spread = features.mean(1, keepdim=True), features.var(1, keepdim=True, unbiased=False)
            features = (features - middle) / torch.sqrt(spread + 1e-7)  # as transformers' feature extractor
        found: Tensor = self.ctc(features).logits
        return found


def write(source: Source, directory: Path, dtype: str) -> None:
    """Write the graph, with the list of tokens and all settings beside it."""
    from transformers import AutoFeatureExtractor, AutoModelForCTC, AutoTokenizer

    ctc = AutoModelForCTC.from_pretrained(source.merged, attn_implementation="eager", dtype=torch.float32)
    extractor: Any = AutoFeatureExtractor.from_pretrained(source.merged)
    shutil.copytree(source.merged, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS))
    (directory / TOKENS).write_text(tokens(AutoTokenizer.from_pretrained(source.merged)), encoding="utf-8")
    if extractor.model_input_names[0] == "input_values":
        example, axes = torch.zeros(2, extractor.sampling_rate), {0: "batch", 1: "samples"}
    else:
        example, axes = torch.zeros(2, 100, _width(extractor)), {0: "batch", 1: "frames"}
    whole = Whole(ctc, bool(getattr(extractor, "do_normalize", False)) and example.dim() == 2)
    write_graph(whole, {"features": example}, ["logits"], {"features": axes}, directory / FILE)


def _width(extractor: Any) -> int:
    """Numbers of a feature frame."""
    made = extractor([np.zeros(extractor.sampling_rate, np.float32)], sampling_rate=extractor.sampling_rate)
    return int(np.asarray(made["input_features"][0]).shape[-1])


def tokens(tokenizer: Any) -> str:
    """sherpa-onnx's list: on each line a token and its id, the blank and the space by its own names."""
    names = {tokenizer.pad_token: BLANK, getattr(tokenizer, "word_delimiter_token", None): SPACE}
    rows = sorted((number, names.get(token, token)) for token, number in tokenizer.get_vocab().items())
    return "".join(f"{token.replace(' ', SPACE)} {number}\n" for number, token in rows)


class Runner:
    """The graph in onnxruntime."""

    def __init__(self, directory: Path):
        self.session = Session(directory / FILE)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Logits [T, V] of one recording: samples [1, N], or features [1, T, F]."""
        logits: np.ndarray = self.session({"features": features})["logits"][0]
        return logits


def runner(source: Source, directory: Path, dtype: str) -> Runner:
    """The artifact in onnxruntime."""
    return Runner(directory)
