"""Trainings of published sizes on a GPU, with random weights: speed, share of the peak, and transformers' own Trainer.

    python tests/benchmarks/gpu.py [--only NAME ...] [--minutes 8] [--steps 8] [--device h100] [--tiny]

Of each: the modality's unit (tokens, seconds, pixels) a second on one device, model FLOPs utilisation, peak memory, and
the ratio to transformers' Trainer over the same batches where it is run too. The operations are those that
`luthier estimate` counts in a step, attention in full, without what activation checkpointing computes again. Kernels
are what is installed: torch's FlashAttention, and Liger's where `liger-kernel` is. What the minutes don't suffice for
is left out and named. `--tiny` runs the same code at toy size, also on a CPU, uncompiled. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from published import CASES, Case
from rich.console import Console
from rich.table import Table

WARM = 5
"""Steps that are not timed: layers are compiled for the first shapes, and the cache of pictures is filled."""
START = 45.0
"""Seconds that must be left for another run to be begun."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--minutes", type=float, default=8.0, help="most time for all")
    parser.add_argument("--steps", type=int, default=8, help="timed optimizer steps of each run")
    parser.add_argument("--repeats", type=int, default=1, help="taken for 1: the time does not suffice for more")
    parser.add_argument("--device", help="its name in the estimate's table, where it is not found by itself")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, also on a CPU: to try the code, not to measure")
    parser.add_argument("--side", nargs=3, metavar=("SIDE", "NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, name, folder = options.side
        print(json.dumps(trained(side, CASES[name], Path(folder), options)))
        return 0
    if not options.tiny:
        _need_device()
    table = all_of(options)
    Console(width=140).print(shown(table))
    print(json.dumps(table), flush=True)
    return 0 if table else 1


def _need_device() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            f"gpu.py needs a CUDA device, and torch {torch.__version__} sees none here; "
            "--tiny runs the same code at toy size on a CPU"
        )


def all_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results by name, without what failed and what there is no time for."""
    deadline = time.monotonic() + 60 * options.minutes
    table: dict[str, dict[str, Any]] = {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            sides = ("ours", "peer") if CASES[name].peer else ("ours",)
            found: dict[str, dict[str, Any]] = {}
            for side in sides:
                left = deadline - time.monotonic()
                if left < START:
                    print(f"{name}, {side}: left out, {left:.0f} s are left", file=sys.stderr, flush=True)
                    continue
                report = child([side, name, folder], options, left)
                if report is not None:
                    found[side] = report
                    print(name, side, json.dumps(report), flush=True)
            if "ours" in found:
                table[name] = compared(found)
    return table


def child(side: list[str], options: argparse.Namespace, seconds: float) -> dict[str, Any] | None:
    """The report of a run in a process of its own, which says itself why it failed; None if it did, or took longer
    than there is time."""
    command = [sys.executable, __file__, "--side", *side, "--steps", str(options.steps)]
    command += ["--tiny"] if options.tiny else []
    command += ["--device", options.device] if options.device else []
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(side)}: not done within {seconds:.0f} s", file=sys.stderr, flush=True)
        return None
    if done.returncode:
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Our report, and what the peer's is to it."""
    own, peer = found["ours"], found.get("peer")
    if peer is None:
        return own
    return {
        **own,
        "ratio": round(own["per_second"] / peer["per_second"], 3),
        "peak_memory_ratio": round(own["peak_gb"] / peer["peak_gb"], 3),
        "peer_per_second": peer["per_second"],
        "peer_loss_first": peer["loss_first"],
    }


def shown(table: dict[str, dict[str, Any]]) -> Table:
    found = Table("work", "a second", "of", "of the peak", "peak, GB", "first step, s", "beside Trainer", "kernels")
    for name, row in table.items():
        found.add_row(
            name, f"{row['per_second']:,.1f}", row["unit"], "?" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['peak_gb']:.1f}", f"{row['first_step_after']:.1f}", f"{row['ratio']:.2f}" if "ratio" in row else "",
            row["kernels"],
        )  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------ one run


def trained(side: str, case: Case, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Speed and memory of one side."""
    import torch

    from luthier.common import console, kinds, reading
    from luthier.common.estimate.hollow import from_configuration

    console.set_up()
    recipe = reading.load(case.recipe, [*overrides(case, folder, options), f"output={folder / side}"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with from_configuration(device):
        report = (_ours if side == "ours" else _peer)(recipe, options.steps)
        peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else report["peak_rss_mb"] / 1e3
        unit, flops = kinds.task(recipe.task.kind).make_processing(recipe).unit, None
        try:
            flops = operations(recipe)
        except Exception as error:  # the speed is kept
            print(f"the operations can't be counted: {error}", file=sys.stderr, flush=True)
    per_second = report["real_per_second"]
    return {
        "per_second": per_second, "unit": unit, "peak_gb": peak,
        "mfu": utilisation(flops * per_second, recipe.train.precision, options.device) if flops else None,
        "flops_per_unit": flops, "loss_first": report["loss_first"], "loss_last": report["loss_last"],
        "first_step_after": report["first_step_after"], "device": _device(), "kernels": _kernels(recipe),
    }  # fmt: skip


def overrides(case: Case, folder: Path, options: argparse.Namespace) -> list[str]:
    """Model and data are made once, for both sides."""
    file, steps = folder / "overrides.json", options.steps + WARM
    if not file.exists():
        file.write_text(json.dumps(case.prepare(folder, options.tiny, steps)), encoding="utf-8")
    made: list[str] = json.loads(file.read_text(encoding="utf-8"))
    liger = case.recipe.startswith("llm/") and find_spec("liger_kernel") and not options.tiny
    return [
        *made, f"model.path={folder / 'model'}", f"data.train={folder / 'rows.jsonl'}", "data.validation=[]",
        "evaluate.every=never", "checkpoint.every=null", "train.devices=1", "train.accumulate=1", "train.epochs=null",
        f"train.steps={steps + 1}", f"data.workers={0 if options.tiny else min(8, os.cpu_count() or 1)}",
        f"train.compile={str(not options.tiny and not case.recipe.startswith('diffusion/')).lower()}",
        *(["model.kernels=liger"] if liger else []),
    ]  # fmt: skip


def operations(recipe: Any) -> float:
    """Floating-point operations for one of the modality's units, of a step that is run dry: with what the cache holds
    by now, and without what activation checkpointing computes again."""
    from luthier.common import kinds
    from luthier.common.check.subject import Subject
    from luthier.common.estimate.step import dry_step
    from luthier.common.training import data

    subject = Subject(recipe, kinds.task(recipe.task.kind))
    subject.processing = subject.kind.make_processing(recipe)
    train = data.gather(recipe, subject.processing, "train")
    assert train is not None
    subject.sets["train"] = train
    subject.plan = data.plan(recipe, train, subject.processing, 1, 1)
    step = dry_step(subject, checkpointing=False)
    return (step.forward + step.backward) / step.cost


def utilisation(flops: float, precision: str, name: str | None) -> float | None:
    """Share of the device's peak by its maker's data sheet; None: it is not in the estimate's table."""
    from luthier.common.errors import LuthierError
    from luthier.common.estimate.devices import find

    try:
        return flops / find(name).peak(precision)
    except LuthierError as error:
        if name is not None:
            raise
        print(f"{error}\n--device names one that is like it", file=sys.stderr, flush=True)
        return None


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _kernels(recipe: Any) -> str:
    import torch

    named = ["compiled"] if recipe.train.compile else []
    named += ["FlashAttention"] if torch.cuda.is_available() else []
    return ", ".join([*named, *(["Liger"] if getattr(recipe.model, "kernels", "torch") == "liger" else [])])


def _ours(recipe: Any, steps: int) -> dict[str, Any]:
    from meter import DeviceMeter, Done

    from luthier.common.training import run

    meter = DeviceMeter(WARM, steps)
    with suppress(Done):
        run.train(recipe, [meter])
    return meter.report()


def _peer(recipe: Any, steps: int) -> dict[str, Any]:
    from meter import DeviceMeter, Done
    from peers.hf_causal import train

    meter = DeviceMeter(WARM, steps)
    with suppress(Done):
        train(recipe, meter, steps + WARM)
    return meter.report()


if __name__ == "__main__":
    sys.exit(main())
