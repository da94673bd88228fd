"""Where the time of a training goes: ours beside a bare PyTorch loop over the same batches, and beside the floor.

    python tests/benchmarks/overhead.py [--works whisper sft ...] [--steps 100] [--repeats 3]

The works are the examples that ship, which need no downloads. The bare loop makes the same batches, and then has only
forward, backward, clipping, optimizer and schedule; neither saves. Of ours also the share of the time from the begin of
a forward pass to the end of the optimizer's step is told: what is left makes batches, logs, and looks after the run.

Floors: forward and backward of the model over the same examples one by one, without padding; and the operations of that
at the rate at which this machine multiplies large matrices. The first is no bound for small models, whose matrices are
larger, and so multiplied faster, in a batch. Also printed are the seconds from the start of the process to the end of
the first step. Nothing else should run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from sides import WARMUP, alternate, child, ours, parser

SIDES = ("bare", "ours", "alone")
ALONE = 5
"""Steps whose examples are taken one by one."""


@dataclass(frozen=True)
class Work:
    """An example that ships.

    Args:
        recipe: of its training.
        prepare: module that makes what the recipe needs, in the folder that it names.
        overrides: of the recipe.
    """

    recipe: str
    prepare: str
    overrides: tuple[str, ...] = ()


# At the end of an epoch a run without evaluations saves: the few pairs are taken 20 times in one.
PAIRS = (
    "model.path=runs/arithmetic/model",
    "data.train={path: runs/arithmetic/pairs/validation.jsonl, weight: 20}",
    "data.test=[]",
)
WORKS = {
    "whisper": Work("asr/demo", "asr.demo.prepare"),
    "ctc": Work("asr/wav2vec2-ctc-toy", "asr.ctc.toy"),
    "sft": Work("llm/arithmetic-sft", "llm.arithmetic.prepare"),
    "dpo": Work("llm/arithmetic-dpo", "llm.arithmetic.prepare", PAIRS),
    "reward": Work(
        "llm/reward",
        "llm.arithmetic.prepare",
        (*PAIRS, "train.precision='32'", "train.gradient_checkpointing=false", "train.accumulate=1",
         "data.max_length=256", "data.batch.tokens=1024"),
    ),
    "embedding": Work("embedding/pydocs", "embedding.pydocs.prepare"),
    "diffusion": Work("diffusion/shapes-base", "diffusion.shapes.prepare"),
}  # fmt: skip


def main() -> None:
    known = parser(__doc__, 100)
    known.add_argument("--works", nargs="+", default=list(WORKS), choices=WORKS)
    known.add_argument("--side", nargs=2, metavar=("NAME", "WORK"), help=argparse.SUPPRESS)
    known.add_argument("--rate", action="store_true", help=argparse.SUPPRESS)
    options = known.parse_args()
    if options.side:
        print(json.dumps(_side(*options.side, options)))
        return
    if options.rate:
        print(json.dumps({"rate": matrix_rate(options.threads)}))
        return
    here, table = str(Path(__file__).resolve()), {}
    rate = child([here, "--rate", "--threads", str(options.threads)], options.threads)["rate"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in options.works:
            _prepare(name)
            common = ["--steps", str(options.steps), "--threads", str(options.threads)]
            runs = alternate(
                {side: [here, *common, "--side", side, name] for side in SIDES}, options.repeats, options.threads
            )
            table[name] = found(runs, options.steps, rate)
    Console(width=120).print(shown(table))
    print(json.dumps({"matrix_rate": rate, "works": table}))


def found(runs: dict[str, list[dict[str, Any]]], steps: int, rate: float) -> dict[str, float]:
    """What is told of a work, in seconds of a step."""
    bare, own = (statistics.median(run["seconds"] for run in runs[side]) / steps for side in ("bare", "ours"))
    return {
        "bare": bare,
        "ours": own,
        "overhead": own / bare - 1,
        "in_model": statistics.median(run["compute_share"] for run in runs["ours"]),
        "alone": statistics.median(run["seconds"] for run in runs["alone"]),
        "operations": runs["alone"][0]["operations"] / rate,
        "first_step_after": statistics.median(run["first_step_after"] for run in runs["ours"]),
    }


def shown(table: dict[str, dict[str, float]]) -> Table:
    names = ("bare, ms", "ours, ms", "overhead", "in the model", "one by one, ms", "operations, ms", "first step, s")
    drawn = Table("work", *names)
    for name, row in table.items():
        drawn.add_row(
            name, f"{1e3 * row['bare']:.1f}", f"{1e3 * row['ours']:.1f}", f"{row['overhead']:+.1%}",
            f"{row['in_model']:.0%}", f"{1e3 * row['alone']:.1f}", f"{1e3 * row['operations']:.1f}",
            f"{row['first_step_after']:.1f}",
        )  # fmt: skip
    return drawn


def _prepare(name: str) -> None:
    module = importlib.import_module(f"luthier.modalities.{WORKS[name].prepare}")
    if name == "diffusion":  # only what its base is trained from
        from luthier.modalities.diffusion.shapes.drawn import make_pictures, words
        from luthier.modalities.diffusion.shapes.model import make_pipeline

        make_pictures(Path(module.FOLDER) / "pictures", 0)
        make_pipeline(Path(module.FOLDER) / "start", words(), 0)
    else:
        module.prepare()


def _side(side: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(options.threads)
    work, steps = WORKS[name], options.steps + WARMUP
    overrides = [*work.overrides, "train.epochs=null", f"train.steps={steps}", "checkpoint.every=null"]
    if side == "ours":
        return ours(work.recipe, overrides, options.threads)
    return (bare if side == "bare" else alone)(work.recipe, overrides)


class Stripped:
    """What a recipe trains, without what trains it.

    Args:
        recipe: its name.
        overrides: of it.
    """

    def __init__(self, recipe: str, overrides: list[str]) -> None:
        from luthier.common import kinds, reading
        from luthier.common.data.processing import PlannedData
        from luthier.common.training import data

        self.recipe = reading.load(recipe, [*overrides, "output=bare", "data.workers=0", "data.validation=[]"])
        self.task = kinds.task(self.recipe.task.kind)(self.recipe)
        train = data.gather(self.recipe, self.task.processing, "train")
        assert train is not None
        self.plan = data.schedule(self.recipe, train, self.task.processing, 1, self.recipe.train.accumulate)
        self.task.total_steps = self.plan.steps
        self.batches = PlannedData(self.task.processing, train.examples, self.recipe.train.seed)
        self.task.train_mode()

    def steps(self) -> Iterator[list[Any]]:
        """The planned batches of each optimizer step."""
        each = iter(self.plan.batches(0))
        for _ in range(self.plan.steps):
            yield list(islice(each, self.recipe.train.accumulate))

    def backward(self, data: Any) -> None:
        loss = self.task.loss(data)
        (loss.sum / loss.count / self.recipe.train.accumulate).backward()


def bare(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """The loop without anything that isn't needed to train: seconds of the steps after the warm-up."""
    import torch

    work = Stripped(recipe, overrides)
    parts = work.task.configure_optimizers()
    optimizer, schedule = parts["optimizer"], parts["lr_scheduler"]["scheduler"]
    trained = [parameter for parameter in work.task.parameters() if parameter.requires_grad]
    ends = []
    for planned in work.steps():
        for one in planned:
            work.backward(work.batches[one].data)
        if work.recipe.optim.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, work.recipe.optim.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return {"seconds": ends[-1] - ends[WARMUP - 1], "first_step_after": _since_start() - (ends[-1] - ends[0])}


def alone(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Forward and backward over each example by itself: seconds and operations of a step after the warm-up, without the
    making of batches."""
    from torch.utils.flop_counter import FlopCounterMode

    work, seconds, operations = Stripped(recipe, overrides), 0.0, 0
    for step, planned in enumerate(islice(work.steps(), WARMUP + ALONE)):
        made = [work.batches[replace(one, indices=(index,))].data for one in planned for index in one.indices]
        began = time.perf_counter()
        for data in made:
            work.backward(data)
        if step < WARMUP:
            continue
        seconds += time.perf_counter() - began
        with FlopCounterMode(display=False) as counter:
            for data in made:
                work.backward(data)
        operations += counter.get_total_flops()
        work.task.zero_grad()
    return {"seconds": seconds / ALONE, "operations": operations / ALONE}


def matrix_rate(threads: int) -> float:
    """Floating-point operations a second of a product of large matrices in float32: the best of ten."""
    import torch

    torch.set_num_threads(threads)
    one, other = torch.randn(2, 2048, 2048)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        one @ other
        best = min(best, time.perf_counter() - began)
    return 2 * 2048**3 / best


def _since_start() -> float:
    """Seconds that this process has lived."""
    return time.time() - psutil.Process().create_time()


if __name__ == "__main__":
    main()
