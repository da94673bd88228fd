"""The whole model as its own library loads it, in any float format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ..source import Source

needs_whole = True
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""Files that other formats leave behind."""


def write(source: Source, directory: Path, dtype: str) -> None:
    """Copy the model, its weights rounded to `dtype`."""
    shutil.copytree(source.merged, directory, dirs_exist_ok=True)
    if dtype != "float32":
        for file in directory.rglob("*.safetensors"):
            cast(file, getattr(torch, dtype))
        for file in directory.rglob("config.json"):
            say(file, dtype)


def cast(file: Path, dtype: torch.dtype) -> None:
    """Round the floats of a safetensors file; what else it holds stays."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(str(file), framework="pt") as read:
        metadata = read.metadata()
        tensors = {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118 - not a mapping
    rounded = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    save_file(rounded, str(file), metadata=metadata)


def say(file: Path, dtype: str) -> None:
    """State the number format in a model's config, if it states one."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = dtype
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def runner(source: Source, directory: Path, dtype: str) -> Any:
    """The model as its library loads it."""
    return source.exportable.load(directory)
