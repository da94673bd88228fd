"""Two trainers on the same work in the same run: each in a process of its own, taking turns; medians are compared."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SHARED = Path(__file__).resolve().parents[3] / "shared"
PEERS = Path(__file__).resolve().parent / "peers"
WARMUP = 2
TRL_SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "default": ([], []),
    "fp32": (["--fp32", "--no-checkpointing"], []),
    "bf16": (["--no-checkpointing"], ["train.precision=bf16-mixed"]),
}
"""Of each comparison with TRL: the peer's options, and our overrides of fp32 without activation checkpointing."""


def parser(document: str | None, steps: int, settings: Collection[str] = (), default: Sequence[str] = ()) -> Any:
    """The options of every comparison: `--steps`, `--repeats`, `--threads`; and, where there are several settings,
    `--settings` and `--ours SETTING FOLDER`, by which the script calls itself for our side."""
    found = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--steps", type=int, default=steps, help="timed optimizer steps of each run")
    found.add_argument("--repeats", type=int, default=3, help="runs of each side; medians are compared")
    found.add_argument("--threads", type=int, default=2)
    if settings:
        found.add_argument("--settings", nargs="+", default=list(default), choices=settings)
        found.add_argument("--ours", nargs=2, metavar=("SETTING", "FOLDER"), help=argparse.SUPPRESS)
    return found


def make_workloads(folder: str, *names: str) -> None:
    """Make workloads of the peers in a folder."""
    made = [sys.executable, str(PEERS / "workloads.py"), folder, "--only", *names]
    subprocess.run(made, check=True, capture_output=True)


def first_rows(folder: str, name: str, number: int) -> None:
    """Write `first-NAME` with so many rows of the file `NAME`: those that a peer trains on."""
    rows = Path(folder, name).read_text(encoding="utf-8").splitlines(keepends=True)
    Path(folder, f"first-{name}").write_text("".join(rows[:number]), encoding="utf-8")


def ours(recipe: str, overrides: Sequence[str], threads: int) -> dict[str, Any]:
    """Train by a recipe once; speed and memory of the steps after the warm-up."""
    import torch
    from meter import Meter

    from luthier.common import console, reading
    from luthier.common.training import run

    torch.set_num_threads(threads)
    console.set_up()
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        options = [*overrides, f"output={folder}/run", "evaluate.every=never", "data.workers=0", "data.validation=[]"]
        run.train(reading.load(recipe, options), [meter])
    return meter.report()


def child(arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """Run a side in a process of its own; its last line of output is JSON."""
    environment = {**os.environ, "PEERS_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def alternate(sides: dict[str, Sequence[str]], repeats: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """Results of every side, by name; each run is printed as it comes.

    Args:
        sides: command line (after `python`) of each.
        repeats: runs of each side.
        threads: CPU threads of each.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, arguments in sides.items():
            results[name].append(child(arguments, threads))
            print(name, json.dumps(results[name][-1]), flush=True)
    return results


def compared(ours: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]], speed: str) -> dict[str, Any]:
    """Ratios of medians over the peer's (speed: above 1 is faster; memory: below 1 is less), and their spread.

    Args:
        speed: name of what is to be as large as possible in a second.

    Returns:
        Also the share of our time from the begin of forward passes to the end of optimizer steps, the losses of the
        first step, which are to agree where the first batches are the same, and the CPU seconds that other processes
        took in a second of ours, at most.
    """

    def median(runs: Sequence[dict[str, Any]], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    base = median(peer, speed)
    each = sorted(run[speed] / base for run in ours)
    return {
        "ratio": round(median(ours, speed) / base, 3),
        "spread": [round(each[0], 3), round(each[-1], 3)],
        "peak_memory_ratio": round(median(ours, "peak_rss_mb") / median(peer, "peak_rss_mb"), 3),
        speed: round(median(ours, speed), 3),
        f"peer_{speed}": round(base, 3),
        "compute_share": round(median(ours, "compute_share"), 3),
        "loss_first": round(median(ours, "loss_first"), 4),
        "peer_loss_first": round(median(peer, "loss_first"), 4),
        "others_share": round(max(run["other_cpu_seconds"] / run["seconds"] for run in ours), 3),
    }


def publish(table: dict[str, dict[str, Any]]) -> None:
    """Print comparisons for people, and on the last line as JSON."""
    console = Console()
    console.print(shown(table))
    print(json.dumps(table), flush=True)


def shown(table: dict[str, dict[str, Any]]) -> Table:
    """Comparisons as a table: one row each."""
    found = Table("work", "speed", "from", "to", "memory", "in model", "loss", "peer's loss", "others")
    for name, row in table.items():
        found.add_row(
            name, f"{row['ratio']:.2f}", *(f"{edge:.2f}" for edge in row["spread"]), f"{row['peak_memory_ratio']:.2f}",
            f"{row['compute_share']:.0%}", f"{row['loss_first']:.4f}", f"{row['peer_loss_first']:.4f}",
            f"{row['others_share']:.0%}",
        )  # fmt: skip
    return found
