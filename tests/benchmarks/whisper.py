"""Whisper fine-tuning beside transformers' Seq2SeqTrainer, on the same real speech in the same run.

    python tests/benchmarks/whisper.py [--steps 10] [--repeats 3] [--lora] [--contexts dynamic full]

Needs `../shared` (speech and weights) beside the clone. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from sides import PEERS, SHARED, WARMUP, alternate, compared, ours, parser, publish

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
    known = parser(__doc__, 10)
    known.add_argument("--lora", action="store_true")
    known.add_argument("--contexts", nargs="+", default=["dynamic", "full"])
    known.add_argument("--ours", nargs=2, metavar=("CONTEXT", "ROWS"), help=argparse.SUPPRESS)
    options = known.parse_args()
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
    peer = results.pop("peer")
    publish({f"whisper_{name}": compared(runs, peer, "items_per_second") for name, runs in results.items()})


if __name__ == "__main__":
    main()
