"""Paraformer as one ONNX graph, the one that FunASR writes for its own runtimes: from features to scores of tokens.

Each recording is to be heard alone, or beside others of its length: FunASR's networks don't mask padding everywhere.
Where it finds no token at all onnxruntime raises an error, which FunASR's own runtimes take for silence.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ...common.errors import ExportError
from ..graph import Session
from ..graph import write as write_graph
from ..source import Source
from .merged import WEIGHTS

needs_whole = True
FILE = "model.onnx"
MODEL = "Paraformer"
PARTS = ("encoder", "predictor", "decoder")


def write(source: Source, directory: Path, dtype: str) -> None:
    """Write the graph, with tokens and the settings of the features beside it.

    Raises:
        ExportError: it is a model with hotwords or of another kind, or FunASR has no graph of one of its parts.
    """
    config = yaml.safe_load((source.merged / "config.yaml").read_text(encoding="utf-8"))
    if config["model"] != MODEL:
        raise ExportError(
            "only a plain Paraformer is written as a graph", where="config.yaml: model", given=config["model"],
            expected=MODEL, do="--to funasr",
        )  # fmt: skip
    paraformer: Any = source.exportable.load(source.merged)
    from funasr.register import tables  # type: ignore[import-untyped]

    for part in PARTS:
        if f"{config[part]}Export" not in getattr(tables, f"{part}_classes"):
            raise ExportError(
                "FunASR has no graph of this", where=f"config.yaml: {part}", given=config[part], do="--to funasr"
            )
    noise = torch.randn(2, 30, paraformer.encoder.encoders0[0].in_size, generator=torch.Generator().manual_seed(0))
    graph = paraformer.export(**{part: config[part] for part in PARTS}, type="onnx", device="cpu")
    given = dict(zip(graph.export_input_names(), (noise, torch.tensor([6, 30], dtype=torch.int32)), strict=True))
    shutil.copytree(source.merged, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS))
    axes = graph.export_dynamic_axes()
    write_graph(graph, given, graph.export_output_names(), axes, directory / FILE, scripted=True)


class Runner:
    """The graph in onnxruntime."""

    def __init__(self, directory: Path):
        self.session = Session(directory / FILE)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Log-probabilities [L, V] of the L tokens that are found in features [1, T, F]; none where the graph fails."""
        given = {"speech": features, "speech_lengths": np.array([features.shape[1]], np.int32)}
        try:
            found = self.session(given)
        except Exception as error:  # its errors have no class in common
            if not type(error).__module__.startswith("onnxruntime"):
                raise
            return np.zeros((0, 1), np.float32)
        scores: np.ndarray = found["logits"][0, : int(found["token_num"][0])]
        return scores


def runner(source: Source, directory: Path, dtype: str) -> Any:
    """The artifact in onnxruntime, its scores read by FunASR's decoding."""
    return source.exportable.runner_of(Runner(directory))
