"""What large data cost before and during a training: planning, reading, and finding the place to go on from.

    python tests/benchmarks/data.py [--examples 1000000] [--lines 10000000]

Plans that many synthetic examples; then streams that many lines of JSONL through the dialogues of the arithmetic
exercise. Printed are seconds, those of the processor, and by how much the resident memory grew at most. The lines take
about 3 GB below `--folder` meanwhile. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from luthier.common import kinds, reading
from luthier.common.data.collect import Report
from luthier.common.data.plan import Bounds, Plan
from luthier.common.data.stream import Place, Stream
from luthier.modalities.llm.arithmetic.prepare import prepare

BUFFER = 10_000
"""Examples of a window."""
WINDOWS = 4
"""That are read after the first one: memory must not grow with them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="where the lines are written; default: that of the system")
    options = parser.parse_args()
    rows = [*planning(options.examples)]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows += streaming(Path(folder), options.lines)
    table = Table("what", "seconds", "of the processor", "memory, MB")
    for row in rows:
        table.add_row(row["what"], f"{row['seconds']:.2f}", f"{row['cpu']:.2f}", f"{row['memory_mb']:.0f}")
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
    file, middle = folder / "large.jsonl", [0, 0]
    with file.open("w", encoding="utf-8", newline="\n") as out:
        for begin in range(0, number, len(lines)):
            if begin <= number // 2:
                middle = [begin, out.tell()]  # lines and bytes before it
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
        read = row.pop("result")
    yield row
    with measured(f"the next {WINDOWS} windows, each", lambda: follow(stream, read.sources)) as row:
        row.pop("result")
    yield {**row, "seconds": row["seconds"] / WINDOWS}
    place = Place(1, 0, ({"start": middle, "skip": 0, "taken": middle[0]},), Report(processing.unit))
    again = Stream(recipe.data.train, processing, recipe.data)
    with measured(f"window after line {middle[0]:,}, of a run that goes on", lambda: again.read(place)) as row:
        row.pop("result")
    yield row


def follow(stream: Stream, sources: tuple[Mapping[str, Any], ...]) -> None:
    """Read some windows, one after the other, as a training does."""
    for window in range(WINDOWS):
        place = Place(window + 1, 0, sources, Report(stream.processing.unit))
        sources = stream.read(place).sources
        stream.forget()


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
    began, cpu = time.perf_counter(), time.process_time()
    result = work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    done.set()
    watcher.join()
    peak = max(peak, process.memory_info().rss)
    yield {"what": what, "seconds": seconds, "cpu": cpu, "memory_mb": (peak - before) / 2**20, "result": result}


if __name__ == "__main__":
    main()
