"""What our loop costs: a training beside a bare PyTorch loop over the same batches with the same loss.

    python tests/benchmarks/overhead.py [--works asr llm embedding diffusion] [--steps 40] [--repeats 3]

The works are the examples that ship, which need no downloads. The bare loop makes the same batches, and then has only
forward, backward, clipping, optimizer and schedule. Printed are seconds of a step of both, the loop's cost above the
bare one, and the seconds from the start of the process to the end of the first step. Nothing else should run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from sides import WARMUP, alternate, ours, parser

WORKS = {
    "asr": ("asr/demo", "asr.demo.prepare"),
    "llm": ("llm/arithmetic-sft", "llm.arithmetic.prepare"),
    "embedding": ("embedding/pydocs", "embedding.pydocs.prepare"),
    "diffusion": ("diffusion/shapes-base", "diffusion.shapes.prepare"),
}
"""Of each: its recipe, and what makes what the recipe needs in the folder that it names."""


def main() -> None:
    known = parser(__doc__, 40)
    known.add_argument("--works", nargs="+", default=list(WORKS), choices=WORKS)
    known.add_argument("--side", nargs=2, metavar=("NAME", "WORK"), help=argparse.SUPPRESS)
    options = known.parse_args()
    if options.side:
        print(json.dumps(_side(*options.side, options)))
        return
    here = str(Path(__file__).resolve())
    found = Table("work", "bare, s/step", "ours, s/step", "overhead", "first step after, s")
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for work in options.works:
            _prepare(work)
            common = ["--steps", str(options.steps), "--threads", str(options.threads)]
            sides = {name: [here, *common, "--side", name, work] for name in ("bare", "ours")}
            runs = alternate(sides, options.repeats, options.threads)
            bare, own = (statistics.median(run["seconds"] for run in runs[name]) / options.steps for name in sides)
            first = statistics.median(run["first_step_after"] for run in runs["ours"])
            table[work] = {"bare": bare, "ours": own, "overhead": own / bare - 1, "first_step_after": first}
            found.add_row(work, f"{bare:.4f}", f"{own:.4f}", f"{own / bare - 1:+.1%}", f"{first:.1f}")
    Console().print(found)
    print(json.dumps(table))


def _prepare(work: str) -> None:
    module = importlib.import_module(f"luthier.modalities.{WORKS[work][1]}")
    if work == "diffusion":  # only what its base is trained from
        from luthier.modalities.diffusion.shapes.drawn import make_pictures, words
        from luthier.modalities.diffusion.shapes.model import make_pipeline

        make_pictures(Path(module.FOLDER) / "pictures", 0)
        make_pipeline(Path(module.FOLDER) / "start", words(), 0)
    else:
        module.prepare()


def _side(name: str, work: str, options: argparse.Namespace) -> dict[str, Any]:
    steps = options.steps + WARMUP
    overrides = ["train.epochs=null", f"train.steps={steps}"]
    run = ours if name == "ours" else bare
    return run(WORKS[work][0], overrides, options.threads)


def bare(recipe: str, overrides: list[str], threads: int) -> dict[str, Any]:
    """The loop without anything that isn't needed to train: seconds of the steps after the warm-up."""
    import torch

    from luthier.common import kinds, reading
    from luthier.common.data.processing import PlannedData
    from luthier.common.training import data

    torch.set_num_threads(threads)
    made = reading.load(recipe, [*overrides, "output=bare", "data.workers=0", "data.validation=[]"])
    task = kinds.task(made.task.kind)(made)
    train = data.gather(made, task.processing, "train")
    assert train is not None
    plan = data.schedule(made, train, task.processing, 1, made.train.accumulate)
    task.total_steps = plan.steps
    batches = PlannedData(task.processing, train.examples, made.train.seed)
    parts = task.configure_optimizers()
    optimizer, schedule = parts["optimizer"], parts["lr_scheduler"]["scheduler"]
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
    task.train_mode()
    ends, each = [], iter(plan.batches(0))
    for _ in range(plan.steps):
        for planned in islice(each, made.train.accumulate):
            loss = task.loss(batches[planned].data)
            (loss.sum / loss.count / made.train.accumulate).backward()
        if made.optim.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, made.optim.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return {"seconds": ends[-1] - ends[WARMUP - 1], "first_step_after": _since_start() - (ends[-1] - ends[0])}


def _since_start() -> float:
    """Seconds that this process has lived."""
    return time.time() - psutil.Process().create_time()


if __name__ == "__main__":
    main()
