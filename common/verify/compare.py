"""Whether two finished runs are the same run: their losses, weights, optimizer and counters, to the last bit."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ..checkpoint.directory import sha256
from ..training import curves

INDEX, SHARD = ".metadata", ".distcp"
"""Files of a state that torch.distributed.checkpoint has sharded."""
CLOCK = re.compile(r"(^|[./_])seconds?$")
"""Names of what is measured by the clock and differs between any two runs."""
SITTING = (": global_step",)
"""Lightning's own counters in `state/`, which start anew each time that a run goes on; the run's are its position."""
READER = re.compile(r"\.sources\[\d+\]\.start\[0\]$")
"""Where `datasets` says that a stream stands: it has several states for the same row. The row itself is compared."""


@dataclass(frozen=True)
class Difference:
    """Something that is not equal.

    Args:
        where: file and name within it.
        size: largest difference as a share of the largest magnitude; infinite where there is nothing to subtract.
    """

    where: str
    size: float

    def __str__(self) -> str:
        return f"{self.where} ({'not the same' if math.isinf(self.size) else f'by {self.size:.2g}'})"


def curves_differ(first: Path, second: Path, until: int | None = None) -> list[Difference]:
    """Differences between the losses, norms, rates and metrics that two runs logged.

    Args:
        first: folder of a run.
        second: folder of another.
        until: compare up to this optimizer step; default: all.
    """
    ours, theirs = (_points(folder / "curves.csv", until) for folder in (first, second))
    found = []
    for key in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(key, []), theirs.get(key, [])
        if one != other:
            single = len(one) == len(other) == 1
            size = _number(float(one[0]), float(other[0])) if single else math.inf
            found.append(Difference(f"curves.csv: {key[1]} at step {key[0]}", size))
    return found


def _points(file: Path, until: int | None) -> dict[tuple[int, str], list[str]]:
    """All values as written, by step and name: one each, unless a resumed run has doubled it."""
    found: dict[tuple[int, str], list[str]] = {}
    for row in curves.read(file):
        step, name = int(row["step"]), row["name"]
        if not CLOCK.search(name) and (until is None or step <= until):
            found.setdefault((step, name), []).append(row["value"])
    return found


def checkpoints_differ(first: Path, second: Path) -> list[Difference]:
    """Differences between `model/` and `state/` of two checkpoints."""
    names = [{str(path.relative_to(checkpoint)) for path in _files(checkpoint)} for checkpoint in (first, second)]
    found = [Difference(name, math.inf) for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        one, other = first / name, second / name
        if one.name == INDEX or sha256(one) != sha256(other):
            found += [Difference(f"{name}{path}", size) for path, size in _unequal("", _read(one), _read(other))]
    return found


def _files(checkpoint: Path) -> list[Path]:
    """Files of a checkpoint to be compared; a sharded state counts as one, named by its index."""
    files = [path for part in ("model", "state") for path in (checkpoint / part).rglob("*") if path.is_file()]
    return [path for path in files if path.suffix != SHARD]


def _read(file: Path) -> Any:
    """Tensors and values of a file; of a file of another kind its hash."""
    if file.suffix == ".safetensors":
        return load_file(file)
    if file.suffix == ".pt":
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if file.name == INDEX:
        with tempfile.TemporaryDirectory(dir=file.parents[2]) as folder:
            dcp_to_torch_save(file.parent, Path(folder) / "whole.pt")
            return torch.load(Path(folder) / "whole.pt", map_location="cpu", weights_only=True)
    return sha256(file)


def _unequal(path: str, first: Any, second: Any) -> Iterator[tuple[str, float]]:
    """(path, size) of each difference between two trees of tensors and plain values."""
    if isinstance(first, Mapping) and isinstance(second, Mapping) and first.keys() == second.keys():
        for key in first:
            yield from _unequal(f"{path}.{key}" if path else f": {key}", first[key], second[key])
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for at, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _unequal(f"{path}[{at}]", one, other)
    elif isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            yield path, math.inf
        elif not torch.equal(_bytes(first), _bytes(second)):
            yield path, _distance(first, second)
    elif not _same(first, second) and not _is_free(path):
        numbers = all(isinstance(value, int | float) for value in (first, second))
        yield path, _number(first, second) if numbers else math.inf


def _is_free(path: str) -> bool:
    """Whether a value may differ between equal runs."""
    return CLOCK.search(path) is not None or READER.search(path) is not None or path in SITTING


def _same(first: Any, second: Any) -> bool:
    return bool(first == second) or (first != first and second != second)  # NaN is not equal to itself


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _distance(first: Tensor, second: Tensor) -> float:
    one, other = first.detach().double(), second.detach().double()
    scale = float(torch.maximum(one.abs().max(), other.abs().max()))
    size = float((one - other).abs().max()) / (scale or 1.0)
    return size if math.isfinite(size) else math.inf


def _number(first: float, second: float) -> float:
    size = abs(first - second) / (max(abs(first), abs(second)) or 1.0)
    return size if math.isfinite(size) else math.inf
