"""Whisper fine-tuning beside transformers' Seq2SeqTrainer, on the same real speech in the same run.

    python tests/benchmarks/whisper.py [--steps 10] [--repeats 3] [--lora] [--contexts dynamic full]

Needs `../shared` (speech, weights, the peer's script) beside the clone. Ratios of medians are printed as JSON. Nothing
else should run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from sides import PEERS, SHARED, WARMUP, alternate, compared, ours, publish

MODEL = SHARED / "models" / "whisper-tiny.en"
BATCH = 8


def rows_of(steps: int, folder: Path) -> Path:
    """The rows that the peer trains on, as a manifest."""
    sys.path.insert(0, str(PEERS))
    import workloads

    rows = [row for row in workloads.speech("it", "train") if row["duration"] <= 30.0][: BATCH * (steps + WARMUP)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, "audio": str(row["audio"]), "language": "it"}) + "\n" for row in rows))
    return file


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
        context, rows = options.ours
        overrides = [
            f"model.path={MODEL}", f"data.train={rows}", "train.epochs=1", f"model.audio_context={context}",
            f"data.batch.examples={BATCH}", "data.audio.silence_dbfs=-120",
        ]  # fmt: skip
        print(json.dumps(ours("asr/whisper-lora" if options.lora else "asr/whisper", overrides, options.threads)))
        return
    lora = ["--lora"] if options.lora else []
    with tempfile.TemporaryDirectory() as folder:
        rows = str(rows_of(options.steps, Path(folder)))
        sides = {"peer": [str(PEERS / "hf_whisper.py"), "--steps", str(options.steps), *lora]}
        for context in options.contexts:
            sides[context] = [__file__, "--ours", context, rows, "--threads", str(options.threads), *lora]
        results = alternate(sides, options.repeats, options.threads)
    table = {f"whisper_{name}": compared(results[name], results["peer"], "items_per_second") for name in sides}
    publish(table)


if __name__ == "__main__":
    main()
