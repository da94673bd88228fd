"""Whisper fine-tuning beside transformers' Seq2SeqTrainer, on the same real speech in the same run.

    python tests/benchmarks/whisper.py [--steps 10] [--repeats 3] [--lora]

Needs `../shared` (speech, weights, the peer's script) beside the clone. The sides alternate; medians and ratios are
printed and written as JSON. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[3] / "shared"
MODEL = SHARED / "models" / "whisper-tiny.en"
BATCH, WARMUP = 8, 2


def ours(context: str, rows: Path, lora: bool, threads: int) -> dict[str, Any]:
    """Train on the rows once; speed and memory of the steps after the warm-up."""
    import torch
    from meter import Meter

    from luthier.common import console, recipe
    from luthier.common.training import run

    torch.set_num_threads(threads)
    console.set_up()
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        run.train(
            recipe.load(
                "asr/whisper-lora" if lora else "asr/whisper",
                [
                    f"model.path={MODEL}", f"data.train={rows}", f"output={folder}/run", "train.epochs=1",
                    f"model.audio_context={context}", f"data.batch.examples={BATCH}", "evaluate.every=never",
                    "data.workers=0", "data.validation=[]", "data.audio.silence_dbfs=-120",
                ],
            ),
            [meter],
        )  # fmt: skip
    return meter.report()


def rows_of(steps: int, folder: Path) -> Path:
    """The rows that the peer trains on, as a manifest."""
    sys.path.insert(0, str(SHARED / "peers"))
    import workloads

    rows = [row for row in workloads.speech("it", "train") if row["duration"] <= 30.0][: BATCH * (steps + WARMUP)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, "audio": str(row["audio"]), "language": "it"}) + "\n" for row in rows))
    return file


def child(*arguments: str, threads: int) -> dict[str, Any]:
    """Run a side in a process of its own; its last line of output is JSON."""
    environment = {**os.environ, "PEERS_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="timed optimizer steps of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; medians are compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--contexts", nargs="+", default=["dynamic", "full"])
    parser.add_argument("--ours", nargs=2, metavar=("CONTEXT", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        print(json.dumps(ours(options.ours[0], Path(options.ours[1]), options.lora, options.threads)))
        return
    lora = ["--lora"] if options.lora else []
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(options.steps, Path(folder))
        peer = [str(SHARED / "peers" / "hf_whisper.py"), "--steps", str(options.steps), *lora]
        for _ in range(options.repeats):
            results.setdefault("peer", []).append(child(*peer, threads=options.threads))
            for context in options.contexts:
                mine = [__file__, "--ours", context, str(rows), "--threads", str(options.threads), *lora]
                results.setdefault(context, []).append(child(*mine, threads=options.threads))
            for side, runs in results.items():
                print(side, json.dumps(runs[-1]), flush=True)
    print(json.dumps(compared(results), indent=1))


def compared(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each side, and ratios over the peer's (speed: above 1 is faster; memory: below 1 is less)."""

    def median(side: str, name: str) -> float:
        return statistics.median(run[name] for run in results[side])

    table: dict[str, Any] = {}
    for side in results:
        table[side] = {
            name: round(median(side, name), 3) for name in ("items_per_second", "peak_rss_mb", "padding_share")
        }
        if side != "peer":
            table[side]["speed_ratio"] = round(median(side, "items_per_second") / median("peer", "items_per_second"), 3)
            table[side]["memory_ratio"] = round(median(side, "peak_rss_mb") / median("peer", "peak_rss_mb"), 3)
    return table


if __name__ == "__main__":
    main()
