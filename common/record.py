"""The run record: what a model was trained on and with what, in `run.json`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .checkpoint.directory import sha256

PACKAGES = (
    "luthier", "torch", "lightning", "transformers", "peft", "datasets", "numpy", "safetensors", "tokenizers",
    "soundfile", "soxr", "jiwer", "funasr", "nemo-toolkit", "sentence-transformers", "diffusers", "bitsandbytes",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that a run may use."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git(folder: Path) -> dict[str, Any] | None:
    """Commit and dirty state of the repository around `folder`; None outside of one."""

    def ask(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def model_hash(path: str) -> str | None:
    """SHA-256 over the weight files of a local model, by name and content; None for a hub name."""
    folder = Path(path)
    files = sorted(file for pattern in ("*.safetensors", "*.bin", "*.pt") for file in folder.glob(pattern))
    if not files:
        return None
    import hashlib

    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name} {sha256(file)}\n".encode())
    return whole.hexdigest()


def devices() -> list[str]:
    """The accelerators of this machine, or its CPU."""
    import torch

    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [f"cpu ({os.cpu_count()} cores, {platform.machine()})"]


def record(recipe: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The record at the start of a run.

    Args:
        recipe: the resolved recipe as plain values.
        data: report and SHA-256 of each data set.
    """
    return {
        "recipe": recipe,
        "data": data,
        "model": {"path": recipe["model"]["path"], "sha256": model_hash(recipe["model"]["path"])},
        "git": git(Path.cwd()),
        "versions": versions(),
        "devices": devices(),
        "command": " ".join(sys.argv),
        "seed": recipe["train"]["seed"],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_text(file: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a half."""
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(text, encoding="utf-8", newline="")
    temporary.replace(file)


def write_json(file: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
