"""What large data cost before and during a training: planning, reading, and finding the place to go on from.

    python tests/benchmarks/data.py [--examples 1000000] [--lines 10000000]

Plans that many synthetic examples; then streams that many lines of JSONL through the dialogues of the arithmetic
exercise. Printed are seconds, and by how much the resident memory grew at most. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from luthier.common import kinds, reading
from luthier.common.data.plan import Bounds, Plan
from luthier.common.data.stream import Place, Reader, Stream
from luthier.modalities.llm.arithmetic.prepare import prepare

BUFFER = 10_000
"""Examples of a window."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--lines", type=int, default=10_000_000)
    options = parser.parse_args()
    rows = [*planning(options.examples)]
    with tempfile.TemporaryDirectory() as folder:
        rows += streaming(Path(folder), options.lines)
    table = Table("what", "seconds", "memory, MB")
    for row in rows:
        table.add_row(row["what"], f"{row['seconds']:.2f}", f"{row['memory_mb']:.0f}")
    Console().print(table)
    print(json.dumps(rows))


def planning(number: int) -> Iterator[dict[str, Any]]:
    """Three epochs of examples of 1 to 30 seconds, batches of 240 s in groups of similar lengths."""
    costs = np.random.default_rng(0).uniform(1, 30, number)
    bounds = Bounds(64, 240.0, 100)
    with measured(f"plan {number:,} examples", lambda: Plan(costs, bounds, seed=0, epochs=3.0)) as row:
        plan: Plan = row.pop("result")
    yield row
    with measured("its first batch", lambda: next(plan.batches(0))) as row:
        row.pop("result")
    yield row
    middle = plan.total // 2
    with measured(
        "go on from its middle", lambda: next(Plan(costs, bounds, seed=0, epochs=3.0).batches(middle))
    ) as row:
        row.pop("result")
    yield row


def streaming(folder: Path, number: int) -> Iterator[dict[str, Any]]:
    """Lines of the arithmetic exercise, over and over."""
    prepare(folder / "arithmetic")
    lines = (folder / "arithmetic/sums/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    file = folder / "large.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for begin in range(0, number, len(lines)):
            out.writelines(lines[: number - begin])
    recipe = reading.load(
        "llm/arithmetic-sft",
        [f"model.path={folder / 'arithmetic/model'}", f"data.train={file}", "data.streaming=true",
         f"data.buffer={BUFFER}", "data.validation=[]", "data.test=[]"],
    )  # fmt: skip
    processing = kinds.task(recipe.task.kind).make_processing(recipe)
    size = f"{number:,} lines ({file.stat().st_size / 1e9:.1f} GB)"
    stream = Stream(recipe.data.train, processing, recipe.data)
    with measured(f"first window of {BUFFER:,} of {size}", lambda: stream.read(stream.begin)) as row:
        row.pop("result")
    yield row
    reader = Reader(recipe.data.train[0], processing, stream.begin.sources[0])
    for _ in range(number // 2):
        reader.next()
    middle = Place(number // 2 // BUFFER, 0, (reader.mark(),), stream.begin.report)
    del reader
    again = Stream(recipe.data.train, processing, recipe.data)
    with measured("window in its middle, of a run that goes on", lambda: again.read(middle)) as row:
        row.pop("result")
    yield row


@contextmanager
def measured(what: str, work: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Seconds of a piece of work and the growth of resident memory meanwhile, with its `result`."""
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    peak = max(peak, process.memory_info().rss)
    yield {"what": what, "seconds": seconds, "memory_mb": (peak - before) / 2**20, "result": result}


if __name__ == "__main__":
    main()
