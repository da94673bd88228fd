"""How long training stands still for a checkpoint: synchronous, asynchronous, and a plain torch.save of the same state.

    python tests/benchmarks/saving.py [--megabytes 50] [--saves 7] [--between 5] [--folder .] [--json FILE]

Trains a plain multilayer perceptron with AdamW on CPU through `luthier train`'s own code and takes the time that each
save holds up the steps: all of it when synchronous; when asynchronous writing only, and waiting for the save before if
that is not sealed yet. A plain torch.save writes what is in `state/`, weights and moments, without hashes, without
forcing it to the disk, and without the loadable model beside it. Nothing else should run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

TOY = Path(__file__).resolve().parents[1] / "common" / "training" / "toy.py"
DEPTH = 3
MODES = {"synchronous": False, "asynchronous": True}


def load_toy() -> ModuleType:
    """The toy task of the tests, known as a kind in this process."""
    from luthier.common import kinds

    spec = importlib.util.spec_from_file_location("luthier_toy_module", TOY)
    assert spec is not None
    assert spec.loader is not None
    toy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    sys.modules.update({f"{toy.MODULE}.config": toy, f"{toy.MODULE}.task": toy})
    kinds.modules()[toy.KIND] = toy.MODULE
    return toy


def widen(toy: ModuleType, width: int) -> None:
    """Give the toy a model of some size: `DEPTH` square layers of `width`."""
    from torch import nn

    class Wide(nn.Module):
        def __init__(self, _section: Any) -> None:
            super().__init__()
            square = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())]
            self.layers = nn.Sequential(nn.Linear(toy.FEATURES, width), nn.Tanh(), *square, nn.Linear(width, 1))

        def forward(self, x: Any) -> Any:
            return self.layers(x)[:, 0]

    toy.Net = Wide  # type: ignore[attr-defined]


class Stopwatch:
    """Seconds that each call of `Saver.save` takes, while it is installed."""

    def __init__(self) -> None:
        from luthier.common.checkpoint.save import Saver

        self.seconds: list[float] = []
        self._saver, self._save = Saver, Saver.save

    def __enter__(self) -> Stopwatch:
        save = self._save

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = save(*arguments)
            self.seconds.append(time.perf_counter() - start)
            return result

        self._saver.save = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._saver.save = self._save  # type: ignore[method-assign]


def stalls(toy: ModuleType, folder: Path, asynchronous: bool, saves: int, between: int) -> list[float]:
    """Seconds that training stood still for each save but the first, which is slower."""
    data = folder / "train.jsonl"
    toy.write_data(data, [4] * 2 * between)
    overrides = [
        "optim.name=adamw", "train.epochs=null", f"train.steps={between * (saves + 1)}", f"checkpoint.every={between}",
        "checkpoint.keep_last=2", f"checkpoint.asynchronous={str(asynchronous).lower()}", "train.threads=null",
    ]  # fmt: skip
    with Stopwatch() as watch:
        toy.train(toy.make(folder / "run", data, *overrides))
    return watch.seconds[1:]


def plain(checkpoint: Path, saves: int) -> list[float]:
    """Seconds of a plain torch.save of the state of a checkpoint."""
    import torch

    state = torch.load(checkpoint / "state" / "trainer.pt", weights_only=True)
    seconds = []
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        for number in range(saves + 1):
            start = time.perf_counter()
            torch.save(state, Path(folder) / f"{number % 2}.pt")
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def size_of(folder: Path) -> float:
    """MB of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def measure(megabytes: float, saves: int, between: int, place: Path) -> list[dict[str, Any]]:
    """A row for each mode."""
    toy = load_toy()
    widen(toy, round(math.sqrt(megabytes * 1e6 / 4 / DEPTH)))
    rows: list[dict[str, Any]] = []
    for mode, asynchronous in MODES.items():
        with tempfile.TemporaryDirectory(dir=place, prefix=".luthier-saving-") as folder:
            seconds = stalls(toy, Path(folder), asynchronous, saves, between)
            last = Path(folder) / "run" / "checkpoints" / "last"
            base = statistics.median(plain(last.resolve(), saves))
            rows.append(
                {
                    "saving": mode,
                    "model_mb": round(size_of(last / "model"), 1),
                    "state_mb": round(size_of(last / "state"), 1),
                    "saves": len(seconds),
                    "stands_still_s": round(statistics.median(seconds), 3),
                    "longest_s": round(max(seconds), 3),
                    "plain_torch_save_s": round(base, 3),
                    "share_of_plain": round(statistics.median(seconds) / base, 2),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=50, help="size of the weights")
    parser.add_argument("--saves", type=int, default=7, help="saves that count; medians are taken")
    parser.add_argument("--between", type=int, default=5, help="optimizer steps between two saves")
    parser.add_argument("--folder", type=Path, default=Path(), help="where it writes: the disk that is measured")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()

    from rich.console import Console
    from rich.table import Table

    from luthier.common import console

    console.set_up()
    rows = measure(options.megabytes, options.saves, options.between, options.folder)
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
