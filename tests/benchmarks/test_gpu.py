"""The GPU suite's code, at toy size on whatever device there is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = Path(__file__).with_name("gpu.py")
CASES = (
    "gpu_qwen3_0.6b", "gpu_llama3_8b_lora", "gpu_whisper_large_v3_lora", "gpu_sdxl_lora", "gpu_qwen3_1.7b",
)  # fmt: skip


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(GPU), *arguments], capture_output=True, text=True, check=False)


def tiny(name: str) -> dict[str, Any]:
    done = ran("--tiny", "--only", name, "--steps", "2", "--minutes", "20")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])[name]
    return found


def is_measured(row: dict[str, Any]) -> bool:
    figures = [row[name] for name in ("per_second", "peak_gb", "flops_per_unit", "loss_first", "first_step_after")]
    return all(math.isfinite(figure) and figure > 0 for figure in figures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so() -> None:
    done = ran()
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr
    assert "--tiny" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_case_runs_at_toy_size(name: str) -> None:
    row = tiny(name)
    assert is_measured(row)
    if torch.cuda.is_available():
        return
    assert row["device"] == "cpu"
    assert 0 < row["mfu"] < 1  # the peak is measured there and then


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu_qwen3_0.6b", "gpu_llama3_8b_lora"])
def test_the_peer_has_the_same_weights_and_batches(name: str) -> None:
    row = tiny(name)
    assert row["ratio"] == round(row["per_second"] / row["peer_per_second"], 3)
    assert row["loss_first"] == pytest.approx(row["peer_loss_first"], rel=2e-3)  # bf16: 8 bits of a logit


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    row = tiny("gpu_qwen3_0.6b")
    assert is_measured(row)
    assert "FlashAttention" in row["kernels"]
