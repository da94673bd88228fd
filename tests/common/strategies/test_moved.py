"""A step of ours sends what bare DistributedDataParallel and bare FSDP2 send, counted; no time is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCALING = Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"
SMALL = 256
"""Bytes: what is larger is weights or gradients."""
TOLD = 6 * 8 + 4 + 8
"""Bytes that a step may tell the other ranks beside: loss, count and four sums of what was consumed in float64, the
square of the norm, and the flag of a signal."""

Calls = list[tuple[str, int]]


@pytest.fixture(scope="module")
def sent() -> dict[str, dict[str, Calls]]:
    """By strategy and side: (operation, bytes) of each collective of the first of two processes in a step."""
    command = [sys.executable, str(SCALING), "--moved", "--processes", "2", "--steps", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        name.removesuffix("_2"): {side: [(what, size) for what, size in calls] for side, calls in sides.items()}
        for name, sides in found.items()
    }


def large(calls: Calls) -> Calls:
    return sorted(call for call in calls if call[1] > SMALL)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_weights_and_gradients_are_sent_as_by_bare_torch(sent: dict[str, dict[str, Calls]], strategy: str) -> None:
    ours, bare = sent[strategy]["ours"], sent[strategy]["bare"]
    assert large(bare)
    assert large(ours) == large(bare)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_beside_them_next_to_nothing_is_sent(sent: dict[str, dict[str, Calls]], strategy: str) -> None:
    ours, bare = (sum(size for _, size in sent[strategy][side] if size <= SMALL) for side in ("ours", "bare"))
    assert ours <= bare + TOLD


def test_ddp_sends_each_gradient_once(sent: dict[str, dict[str, Calls]]) -> None:
    width, inner, layers, rows = 256, 768, 4, 2048  # as scaling.py has them
    layer = 4 * width * width + 3 * width * inner + 2 * width
    parameters = 2 * rows * width + layers * layer + width
    # A ring sends 2 (W - 1) / W times the 4 bytes of each parameter: 4 bytes on two processes.
    assert sum(size for _, size in large(sent["ddp"]["ours"])) == 4 * parameters
