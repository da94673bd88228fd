"""Preferences and reward models beside TRL's DPOTrainer and RewardTrainer, on the same pairs in the same run.

    python tests/benchmarks/preferences.py {dpo,reward} [--steps 6] [--repeats 3] [--settings default fp32 bf16]

Needs TRL (the extra `bench`). Both sides train the same model on the same pairs: an adapter for `dpo`, with the
reference computed with it switched off in every step, all weights for `reward`. TRL pads the answers and computes each
prompt twice; we join them and compute it once. `default` is TRL as it comes (bf16 autocast, activation checkpointing)
beside ours in fp32 without, `fp32` both in fp32 without checkpointing, `bf16` both in bf16 without. Nothing else should
run.
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

BATCH, LENGTH = 8, 1024
WORKLOADS: dict[str, tuple[str, str, list[str]]] = {
    "dpo": (
        "trl_dpo.py",
        "llm/dpo",
        [
            "optim.learning_rate=1e-6",
            "model.lora={rank: 16, alpha: 32, dropout: 0.05, target_modules: [q_proj, v_proj]}",
        ],
    ),
    "reward": ("trl_reward.py", "llm/reward", ["optim.learning_rate=1e-4", "task.centering=0"]),
}
"""The peer's script, our recipe, and what it is to be as the peer's."""


def main() -> None:
    known = parser(__doc__, 6, TRL_SETTINGS, ["default", "fp32"])
    known.add_argument("workload", choices=WORKLOADS)
    options = known.parse_args()
    if options.ours:
        setting, workloads = options.ours
        print(json.dumps(_ours(Path(workloads), TRL_SETTINGS[setting][1], options)))
        return
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        make_workloads(folder, "preferences", "llm", "tokenizer")
        first_rows(folder, "preferences.jsonl", BATCH * (options.steps + WARMUP))
        script, steps = WORKLOADS[options.workload][0], ["--steps", str(options.steps)]
        for setting in options.settings:
            mine = [__file__, options.workload, *steps, "--threads", str(options.threads), "--ours", setting, folder]
            peer = [str(PEERS / script), *steps, "--workloads", folder, *TRL_SETTINGS[setting][0]]
            results = alternate({"peer": peer, "ours": mine}, options.repeats, options.threads)
            table[f"{options.workload}_{setting}"] = compared(results["ours"], results["peer"], "items_per_second")
    publish(table)


def _ours(workloads: Path, overrides: list[str], options: argparse.Namespace) -> dict[str, object]:
    _, recipe, own = WORKLOADS[options.workload]
    return ours(
        recipe,
        [
            f"model.path={workloads / 'llm'}", f"data.train={workloads / 'first-preferences.jsonl'}",
            f"data.max_length={LENGTH}", "data.batch.packing=false", "data.batch.tokens=null",
            f"data.batch.examples={BATCH}", "train.accumulate=1", "train.epochs=null",
            f"train.steps={options.steps + WARMUP}", "train.gradient_checkpointing=false",
            "train.precision='32'", "optim.schedule=linear", "optim.warmup=0", *own, *overrides,
        ],
        options.threads,
    )  # fmt: skip


if __name__ == "__main__":
    main()
