"""Supervised fine-tuning beside TRL's SFTTrainer, on the same conversations in the same run.

    python tests/benchmarks/sft.py [--steps 8] [--repeats 3] [--settings default fp32 bf16] [--vocabulary 128000]

Needs TRL (the extra `bench`). Both sides train the same model on the same rows; TRL pads them, we join them. `default`
is TRL as it comes (bf16 autocast, activation checkpointing) beside ours in fp32 without, `fp32` both in fp32 without
checkpointing, `bf16` both in bf16 without. With `--packing`, TRL packs rows of 1,024 tokens, 2 to a batch (its fastest
on a CPU, where it attends over the whole batch), and ours packs batches of 2,048. `--vocabulary` gives the model so
many tokens, as today's have. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from sides import (
    PEERS,
    TRL_SETTINGS,
    WARMUP,
    alternate,
    compared,
    first_rows,
    make_workloads,
    ours,
    parser,
    publish,
)  # fmt: skip

BATCH, PACKED, LENGTH = 8, 2, 1024


def main() -> None:
    known = parser(__doc__, 8, TRL_SETTINGS, ["default", "fp32"])
    known.add_argument("--packing", action="store_true")
    known.add_argument("--vocabulary", type=int, help="tokens of the model; default: the peer's 16,384")
    options = known.parse_args()
    if options.ours:
        setting, workloads = options.ours
        print(json.dumps(_ours(Path(workloads), TRL_SETTINGS[setting][1], options)))
        return
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        make_workloads(folder, "chat", "llm", "tokenizer")
        first_rows(folder, "chat.jsonl", BATCH * (options.steps + WARMUP))
        if options.vocabulary:
            _enlarge(Path(folder, "llm"), options.vocabulary)
        common = ["--steps", str(options.steps), *(["--packing"] if options.packing else [])]
        batch = ["--batch", str(PACKED if options.packing else BATCH)]
        for setting in options.settings:
            mine = [__file__, *common, "--threads", str(options.threads), "--ours", setting, folder]
            peer = [str(PEERS / "trl_sft.py"), *common, "--workloads", folder, *batch, *TRL_SETTINGS[setting][0]]
            results = alternate({"peer": peer, "ours": mine}, options.repeats, options.threads)
            for runs in results.values():
                for run in runs:
                    trained = run.get("counts", run)["trained_tokens"]
                    run["trained_tokens_per_second"] = trained / run["seconds"]
            name = f"sft{'_packing' if options.packing else ''}_{setting}"
            name += f"_{options.vocabulary}" if options.vocabulary else ""
            table[name] = compared(results["ours"], results["peer"], "trained_tokens_per_second")
    publish(table)


def _enlarge(model: Path, vocabulary: int) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.resize_token_embeddings(vocabulary)
    loaded.save_pretrained(model)


def _ours(workloads: Path, overrides: list[str], options: argparse.Namespace) -> dict[str, object]:
    rows = "chat.jsonl" if options.packing else "first-chat.jsonl"
    packing = "true" if options.packing else "false"
    return ours(
        "llm/sft",
        [
            f"model.path={workloads / 'llm'}", f"data.train={workloads / rows}", f"data.max_length={LENGTH}",
            f"data.batch.examples={BATCH}", "train.epochs=null", f"train.steps={options.steps + WARMUP}",
            "optim.learning_rate=2e-5", f"data.batch.packing={packing}", f"data.batch.tokens={PACKED * LENGTH}",
            "train.accumulate=1", "train.gradient_checkpointing=false", "train.precision='32'", *overrides,
        ],
        options.threads,
    )  # fmt: skip


if __name__ == "__main__":
    main()
