"""Preferences and reward models beside TRL's DPOTrainer and RewardTrainer, on the same pairs in the same run.

    python tests/benchmarks/preferences.py {dpo,reward} [--steps 6] [--repeats 3] [--settings default fp32 bf16]

Needs TRL (`pip install trl`) and `../shared` (the peers' scripts) beside the clone. Both sides train the same model on
the same pairs: an adapter for `dpo`, with the reference computed with it switched off in every step, all weights for
`reward`. TRL pads the answers and computes each prompt twice; we join them and compute it once. `default` is TRL as it
comes (bf16 autocast, activation checkpointing) beside ours in fp32 without, `fp32` both in fp32 without checkpointing,
`bf16` both in bf16 without. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sides import PEERS, TRL_SETTINGS, WARMUP, alternate, compared, ours, publish

BATCH, LENGTH = 8, 1024
WORKLOADS: dict[str, tuple[str, str, list[str]]] = {
    "dpo": (
        "trl_dpo.py",
        "llm/dpo",
        [
            "optim.learning_rate=1e-6",
            "model.lora={rank: 16, alpha: 16, dropout: 0.05, target_modules: [q_proj, v_proj]}",
        ],
    ),
    "reward": ("trl_reward.py", "llm/reward", ["optim.learning_rate=1e-4", "task.centering=0"]),
}
"""The peer's script, our recipe, and what it is to be as the peer's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=6, help="timed optimizer steps of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; medians are compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", nargs="+", default=["default", "fp32"], choices=TRL_SETTINGS)
    parser.add_argument("--ours", nargs=2, metavar=("SETTING", "WORKLOADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        setting, workloads = options.ours
        print(json.dumps(_ours(Path(workloads), TRL_SETTINGS[setting][1], options)))
        return
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        made = [sys.executable, str(PEERS / "workloads.py"), folder, "--only", "preferences", "llm", "tokenizer"]
        subprocess.run(made, check=True, capture_output=True)
        rows = Path(folder, "preferences.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        Path(folder, "first.jsonl").write_text("".join(rows[: BATCH * (options.steps + WARMUP)]), encoding="utf-8")
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
            f"model.path={workloads / 'llm'}", f"data.train={workloads / 'first.jsonl'}", f"data.max_length={LENGTH}",
            "data.batch.packing=false", "data.batch.tokens=null", f"data.batch.examples={BATCH}", "train.accumulate=1",
            "train.epochs=null", f"train.steps={options.steps + WARMUP}", "train.gradient_checkpointing=false",
            "train.precision='32'", "optim.schedule=linear", "optim.warmup=0", *own, *overrides,
        ],
        options.threads,
    )  # fmt: skip


if __name__ == "__main__":
    main()
