"""Causal language models with the weights of their linear layers in 8 bits, as torchao keeps them; transformers loads
them by what their config says. 4 bits are missing: torchao packs and multiplies those on a GPU alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from ..source import Source
from .merged import WEIGHTS

needs_whole = True


def write(source: Source, directory: Path, dtype: str) -> None:
    """Write the model with a scale for each row of a weight; embeddings, norms and the output layer are in bfloat16."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    shutil.copytree(source.merged, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS))
    how = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(source.merged, dtype=torch.bfloat16, quantization_config=how)
    model.save_pretrained(directory)


def runner(source: Source, directory: Path, dtype: str) -> Any:
    """The model as transformers loads it."""
    return source.exportable.load(directory)
