"""Reinforcement learning beside TRL's GRPOTrainer, on the same prompts in the same run.

    python tests/benchmarks/grpo.py [--steps 6] [--repeats 3] [--settings default fp32 bf16]

Needs TRL (the extra `bench`). Both sides train all weights of the same model on their own completions, 8 of 32 tokens
for each of 2 prompts in a step, drawn with transformers in the trainer's process and judged by the same reward. TRL
pads prompts and computes each for every completion; we compute a prompt once for all of them. `default` is TRL as it
comes (bf16 autocast, activation checkpointing) beside ours in fp32 without, `fp32` both in fp32 without checkpointing,
`bf16` both in bf16 without. Nothing else should run.
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

PROMPTS, GENERATIONS, TOKENS = 2, 8, 32
REWARD = """
import sys

sys.path.insert(0, {peers!r})
from workloads import arithmetic_reward


def reward(answers):
    return [arithmetic_reward(one.completion, one.row["answer"]) for one in answers]
"""


def main() -> None:
    options = parser(__doc__, 6, TRL_SETTINGS, ["default", "fp32"]).parse_args()
    if options.ours:
        setting, workloads = options.ours
        print(json.dumps(_ours(Path(workloads), TRL_SETTINGS[setting][1], options)))
        return
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        make_workloads(folder, "arithmetic", "llm", "tokenizer")
        first_rows(folder, "arithmetic.jsonl", PROMPTS * (options.steps + WARMUP))
        Path(folder, "reward.py").write_text(REWARD.format(peers=str(PEERS)), encoding="utf-8")
        steps = ["--steps", str(options.steps)]
        for setting in options.settings:
            mine = [__file__, *steps, "--threads", str(options.threads), "--ours", setting, folder]
            batch = ["--batch", str(PROMPTS * GENERATIONS), "--max-completion-length", str(TOKENS)]
            peer = [str(PEERS / "trl_grpo.py"), *steps, "--workloads", folder, *batch, *TRL_SETTINGS[setting][0]]
            results = alternate({"peer": peer, "ours": mine}, options.repeats, options.threads)
            for runs in results.values():
                for run in runs:
                    completions = run["items"] if "unit" in run else run["items"] * GENERATIONS
                    run["completions_per_second"] = completions / run["seconds"]
            table[f"grpo_{setting}"] = compared(results["ours"], results["peer"], "completions_per_second")
    publish(table)


def _ours(workloads: Path, overrides: list[str], options: argparse.Namespace) -> dict[str, object]:
    reward = f"{{kind: function, function: '{workloads}/reward.py:reward'}}"
    return ours(
        "llm/grpo",
        [
            f"model.path={workloads / 'llm'}", f"data.train={workloads / 'first-arithmetic.jsonl'}", "data.plain=true",
            f"data.batch.examples={PROMPTS}", "task.loss=dapo", f"rollout.num_generations={GENERATIONS}",
            f"rollout.max_new_tokens={TOKENS}", f"rewards=[{reward}]",
            "train.accumulate=1", "train.epochs=null", f"train.steps={options.steps + WARMUP}",
            "train.gradient_checkpointing=false", "train.precision='32'", "optim.schedule=linear", "optim.warmup=0",
            *overrides,
        ],
        options.threads,
    )  # fmt: skip


if __name__ == "__main__":
    main()
