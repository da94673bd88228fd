"""One, two and four processes beside bare DistributedDataParallel and bare FSDP2 over the same batches.

    python tests/benchmarks/scaling.py [--strategies ddp fsdp2] [--processes 1 2 4] [--steps 6] [--repeats 3]

A small Llama, made from its configuration, on CPU over gloo; each process has one thread and the same batch size,
whatever their number (weak scaling). Efficiency is the speed of N processes over N times that of one of the same side.
More processes than cores are told as oversubscribed: their efficiency says nothing of the trainer, the ratio does. The
bare loop has forward, backward, the number that is divided by, clipping, optimizer and schedule. Bytes are those that a
process sends in a step. With `--moved` only they are printed. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from estimate import conftest
from rich.console import Console
from rich.table import Table
from sides import WARMUP, compared, parser, publish

STRATEGIES, PROCESSES, EXAMPLES = ("ddp", "fsdp2"), (1, 2, 4), 4
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.02,
}  # fmt: skip
TURNS = 6
"""Of each conversation: 4 conversations are about 500 tokens."""


def main() -> None:
    known = parser(__doc__, 6)
    known.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    known.add_argument("--processes", nargs="+", type=int, default=list(PROCESSES))
    known.add_argument("--moved", action="store_true", help="only count what a step of both sides sends")
    options = known.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), max(options.processes) * EXAMPLES * (options.steps + WARMUP))
        if options.moved:
            print(json.dumps(moved(Path(folder), options)))
            return
        table = {
            f"scaling_{strategy}_{number}": row
            for strategy in options.strategies
            for number, row in scaled(Path(folder), strategy, options).items()
        }
    show(table)
    publish(table)


def prepare(place: Path, rows: int) -> None:
    """The model, and conversations of one length, so that every batch is as large as every other."""
    makers = conftest("llm")
    makers.SIZES.update(SIZES)
    makers.save_model(place / "model", "llama", "chatml", rows=2048)
    makers.write_rows(place / "rows.jsonl", [makers.dialogue(1, TURNS)] * rows)


def moved(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the first process sends in a step, by strategy, number of processes and side."""
    found: dict[str, Any] = {}
    for strategy in options.strategies:
        for number in options.processes:
            sides = {side: run(place, side, strategy, number, options.steps) for side in ("ours", "bare")}
            found[f"{strategy}_{number}"] = {side: report["calls"] for side, report in sides.items()}
    return found


def scaled(place: Path, strategy: str, options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """The comparison for each number of processes."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(options.repeats):
        for number in options.processes:
            for side in ("bare", "ours"):
                report = run(place, side, strategy, number, options.steps)
                runs.setdefault((side, number), []).append(report)
                print(side, strategy, number, json.dumps({**report, "calls": len(report["calls"])}), flush=True)

    def speed(side: str, number: int) -> float:
        return statistics.median(report["items_per_second"] for report in runs[side, number])

    def sent(side: str, number: int) -> int:
        return sum(size for _, size in runs[side, number][0]["calls"])

    one = min(options.processes)
    return {
        number: {
            **compared(runs["ours", number], runs["bare", number], "items_per_second"),
            "processes": number,
            "oversubscribed": number > (os.cpu_count() or 1),
            "efficiency": round(speed("ours", number) * one / (speed("ours", one) * number), 3),
            "peer_efficiency": round(speed("bare", number) * one / (speed("bare", one) * number), 3),
            "bytes_per_step": sent("ours", number),
            "peer_bytes_per_step": sent("bare", number),
        }
        for number in options.processes
    }


def show(table: dict[str, dict[str, Any]]) -> None:
    found = Table("work", "efficiency", "bare's", "sent in a step, kB", "bare's", "")
    for name, row in table.items():
        found.add_row(
            name, f"{row['efficiency']:.0%}", f"{row['peer_efficiency']:.0%}", f"{row['bytes_per_step'] / 1e3:,.1f}",
            f"{row['peer_bytes_per_step'] / 1e3:,.1f}", "oversubscribed" if row["oversubscribed"] else "",
        )  # fmt: skip
    Console().print(found)


# ------------------------------------------------------------------------------------------------ the processes


def run(place: Path, side: str, strategy: str, number: int, steps: int) -> dict[str, Any]:
    """The report of the first of some processes, forked from one that has the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "luthier.modalities.llm.sft.task", "luthier.common.training.run"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=place) as folder:
        arguments = (folder, side, strategy, number, steps, port)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(number)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            logs = [Path(folder, f"{rank}.log").read_text(errors="replace")[-2000:] for rank in range(number)]
            raise SystemExit(f"{side} {strategy} {number} failed:\n" + "\n".join(logs))
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(number)]
    first: dict[str, Any] = reports[0]
    others = first["other_cpu_seconds"] - sum(report["cpu_seconds"] for report in reports[1:])
    return {**first, "other_cpu_seconds": round(max(0.0, others), 1)}


def _rank(rank: int, folder: str, side: str, strategy: str, number: int, steps: int, port: int) -> None:
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        WORLD_SIZE=str(number), RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    from meter import Meter
    from moved import OneStep

    torch.set_num_threads(1)
    recipe, meter, counted = _recipe(Path(folder), strategy, number, steps), Meter(), OneStep()
    (_ours if side == "ours" else _bare)(recipe, meter, counted)
    Path(folder, f"{rank}.json").write_text(json.dumps({**meter.report(), "calls": counted.moved.calls}))


def _recipe(folder: Path, strategy: str, number: int, steps: int) -> Any:
    from luthier.common import reading

    place = folder.parent
    overrides = [
        f"model.path={place / 'model'}", f"data.train={place / 'rows.jsonl'}", f"output={folder / 'run'}",
        "data.validation=[]", "evaluate.every=never", "data.workers=0", f"data.batch.examples={EXAMPLES}",
        "data.batch.packing=false", "data.batch.tokens=null", "data.max_length=512", "train.accelerator=cpu",
        f"train.devices={number}", f"train.strategy={strategy}", "train.threads=1", "train.accumulate=1",
        "train.epochs=null", f"train.steps={steps + WARMUP}", "train.gradient_checkpointing=false",
        "train.precision='32'",
    ]  # fmt: skip
    return reading.load("llm/sft", overrides)


def _ours(recipe: Any, meter: Any, counted: Any) -> None:
    from luthier.common.training import run

    run.train(recipe, [meter, counted])


def _bare(recipe: Any, meter: Any, counted: Any) -> None:
    """The loop without anything that isn't needed to train on several devices."""
    import torch
    from torch import distributed

    from luthier.common import kinds
    from luthier.common.data.processing import PlannedData
    from luthier.common.task import StepResult
    from luthier.common.training import data

    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    task = kinds.task(recipe.task.kind)(recipe)
    train = data.gather(recipe, task.processing, "train")
    assert train is not None
    plan = data.schedule(recipe, train, task.processing, ranks, ranks)
    task.total_steps = plan.steps
    batches = PlannedData(task.processing, train.examples, recipe.train.seed)
    model = _shared(task, recipe.train.strategy)
    parts = task.configure_optimizers()
    optimizer, schedule = parts["optimizer"], parts["lr_scheduler"]["scheduler"]
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
    task.train_mode()
    seen: Any = SimpleNamespace(callbacks=[meter], accumulate_grad_batches=1)
    meter.on_train_start(seen, task)
    for step, planned in enumerate(islice(plan.batches(0, rank), plan.steps)):
        batch = batches[planned]
        for callback in (meter, counted):
            callback.on_train_batch_start(seen, task, batch, step)
        total, number, _ = model(batch.data)
        total.backward()
        count = torch.tensor([float(total.detach()), number], dtype=torch.float64)
        distributed.all_reduce(count)
        for parameter in trained:
            assert parameter.grad is not None
            parameter.grad.mul_(ranks / float(count[1]))  # the average of the ranks becomes the mean of all tokens
        torch.nn.utils.clip_grad_norm_(trained, recipe.optim.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        task.last_step = StepResult(
            loss=float(count[0] / count[1]), count=float(count[1]), items=ranks * len(batch.indices),
            real=ranks * batch.real, padded=ranks * batch.padded,
        )  # fmt: skip
        for callback in (meter, counted):
            callback.on_train_batch_end(seen, task, None, batch, step)
    distributed.destroy_process_group()


def _shared(task: Any, strategy: str) -> Any:
    """The model as it is called, shared by all processes."""
    if strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(task, gradient_as_bucket_view=True)
    from torch.distributed import get_world_size, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from luthier.common.strategies.sharded import units

    mesh = init_device_mesh("cpu", (get_world_size(),))
    for unit in units(task):
        fully_shard(unit, mesh=mesh)
    return fully_shard(task, mesh=mesh)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
