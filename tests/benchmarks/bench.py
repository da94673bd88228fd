"""Every comparison with a native trainer, one after the other: `make bench`, or `make bench ONLY="asr sft"`.

    python tests/benchmarks/bench.py [--only NAME ...] [--repeats 3] [--output benchmarks.json] [--dry]

Names are those of the results and of their groups. Each script here compares two trainers in one run; this one runs
them and writes what they found as `{"results": [{"name", "ratio", "spread", "peak_memory_ratio", ...}]}`, after each of
them anew, so that a run that was stopped has lost nothing. Results that are in the file already and are not asked for
stay. Nothing else should run.

    python tests/benchmarks/bench.py --compare BEFORE.json AFTER.json

says which ratios fell by over 15%, and then ends with exit code 1.

    python tests/benchmarks/bench.py --table

prints the file as the tables of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from sides import shown

HERE = Path(__file__).resolve().parent
NEMO = HERE.parents[1] / ".venv-nemo" / "bin" / "python"
SLOWER = 0.15
"""Part of a ratio by which it may fall between two runs without being called a slowdown."""


@dataclass(frozen=True)
class Comparison:
    """A script, and the names of what it finds.

    Args:
        group: of the modality.
        script: with its arguments.
        names: result here -> name that the script gives it.
        nemo: whether it needs the environment with NeMo.
        asked: whether it is run only where it, or its group, is named.
    """

    group: str
    script: tuple[str, ...]
    names: Mapping[str, str]
    nemo: bool = False
    asked: bool = False


FP32 = ("--settings", "fp32")
GPU = (
    "gpu_qwen3_0.6b", "gpu_llama3_8b_lora", "gpu_whisper_large_v3_lora", "gpu_sdxl_lora", "gpu_qwen3_1.7b",
)  # fmt: skip
COMPARISONS = (
    Comparison("asr", ("whisper.py",), {"whisper_dynamic": "whisper_dynamic", "whisper_full": "whisper_full"}),
    Comparison("asr", ("paraformer.py",), {"paraformer": "paraformer"}),
    Comparison("asr", ("nemo_speech.py",), {"nemo_ctc": "nemo_ctc"}, nemo=True),
    Comparison("llm", ("sft.py", *FP32), {"sft": "sft_fp32"}),
    Comparison("llm", ("sft.py", "--packing", *FP32), {"sft_packing": "sft_packing_fp32"}),
    Comparison("llm", ("preferences.py", "dpo", *FP32), {"dpo": "dpo_fp32"}),
    Comparison("llm", ("preferences.py", "reward", *FP32), {"reward": "reward_fp32"}),
    Comparison("llm", ("grpo.py", *FP32), {"grpo": "grpo_fp32"}),
    Comparison("embedding", ("embedding.py", "--settings", "fp32"), {"mnrl_fp32": "embedding_fp32"}),
    Comparison("embedding", ("embedding.py", "--settings", "bf16"), {"mnrl_bf16": "embedding_bf16"}),
    Comparison("embedding", ("embedding.py", "--settings", "rerank"), {"rerank": "embedding_rerank"}),
    Comparison(
        "diffusion",
        ("diffusion.py", "--settings", "warm", "cold"),
        {"image_lora_fp32": "image_lora_warm", "image_lora_cold": "image_lora_cold"},
    ),
    Comparison("diffusion", ("diffusion.py", "--settings", "bf16"), {"image_lora_bf16": "image_lora_bf16"}),
    Comparison(
        "scaling",
        ("scaling.py",),
        {name: name for name in (f"scaling_{one}_{ranks}" for one in ("ddp", "fsdp2") for ranks in (1, 2, 4))},
    ),
    Comparison("gpu", ("gpu.py",), {name: name for name in GPU}, asked=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="results or groups; default: all but gpu")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; medians are compared")
    parser.add_argument("--output", type=Path, default=Path("benchmarks.json"))
    parser.add_argument("--dry", action="store_true", help="only say what would be run")
    parser.add_argument("--table", action="store_true", help="only print the output file as Markdown")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return compare(*(read(file) for file in options.compare))
    if options.table:
        print("\n\n".join(markdown(read(options.output))))
        return 0
    if options.dry:
        for comparison in chosen(options.only):
            print(", ".join(comparison.names), ":", *command(comparison, options.repeats))
        return 0
    failed = 0
    for comparison in chosen(options.only):
        found = run(comparison, options.repeats)
        if missing := comparison.names.keys() - found.keys():
            print(f"not found: {', '.join(sorted(missing))}", file=sys.stderr)
            failed += 1
        write(options.output, {**read(options.output), **found})
    Console().print(shown({name: row for name, row in read(options.output).items() if "spread" in row}))
    return 1 if failed else 0


def chosen(only: list[str]) -> list[Comparison]:
    """The comparisons that a list of names asks for; all that need no GPU, if there are none."""
    known = {name for one in COMPARISONS for name in (one.group, *one.names)}
    if wrong := set(only) - known:
        raise SystemExit(f"--only {' '.join(sorted(wrong))}: expected some of {', '.join(sorted(known))}")
    return [one for one in COMPARISONS if {one.group, *one.names} & set(only) or not (only or one.asked)]


def command(comparison: Comparison, repeats: int) -> list[str]:
    """The command line of a comparison."""
    python = str(NEMO) if comparison.nemo else sys.executable
    script, *arguments = comparison.script
    return [python, str(HERE / script), *arguments, "--repeats", str(repeats)]


def run(comparison: Comparison, repeats: int) -> dict[str, dict[str, Any]]:
    """The results of a comparison, by name; none if it failed. What it prints is shown as it comes."""
    asked = command(comparison, repeats)
    print("$", " ".join(asked), file=sys.stderr, flush=True)
    last = ""
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "120"}) as process:
        for last in lines(process):
            print(last, file=sys.stderr, flush=True)
    if process.returncode:
        print(f"{comparison.script[0]}: exit {process.returncode}", file=sys.stderr)
        return {}
    table = json.loads(last)
    return {
        name: {**table[theirs], "machine": machine()} for name, theirs in comparison.names.items() if theirs in table
    }


def machine() -> str:
    """What the figures were taken on."""
    from torch.backends import cpu

    from luthier.common.processor import bf16_units

    bf16 = "with" if bf16_units() else "without"
    return f"{os.cpu_count()} cores, {cpu.get_cpu_capability()}, {bf16} units for bf16"


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip():
            yield line.rstrip("\n")


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Results of a file, by name."""
    rows = json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else []
    return {row["name"]: row for row in rows}


def write(file: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [
        {"name": name, **{key: value for key, value in row.items() if key != "name"}} for name, row in results.items()
    ]
    file.write_text(json.dumps({"results": rows}, indent=1) + "\n", encoding="utf-8")


def markdown(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tables of the comparisons with a peer, and of those of several processes."""
    peers = ["| work | speed, ratio (single runs) | peak memory, ratio | in the model |", "| --- | --- | --- | --- |"]
    processes = [
        "| work | speed, ratio (single runs) | efficiency | the bare loop's | sent in a step, kB | by the bare loop |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in results.items():
        if "spread" not in row:  # of a GPU
            continue
        least, most = row["spread"]
        ratio = f"| `{name}` | {row['ratio']:.2f}" + (f" ({least:.2f} to {most:.2f})" if least != most else "")
        if "efficiency" not in row:
            peers.append(f"{ratio} | {row['peak_memory_ratio']:.2f} | {row['compute_share']:.0%} |")
            continue
        efficiencies = f"{row['efficiency']:.0%} | {row['peer_efficiency']:.0%}"
        sent = f"{row['bytes_per_step'] / 1e3:,.1f} | {row['peer_bytes_per_step'] / 1e3:,.1f}"
        processes.append(f"{ratio} | {efficiencies} | {sent} |")
    return ["\n".join(table) for table in (peers, processes) if len(table) > 2]


def compare(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> int:
    """Print the ratios of both, or the shares of the peak where there is no ratio; 1 if one fell by over 15%."""
    slower = 0
    for name in sorted(before.keys() & after.keys()):
        found = [one[name].get("ratio", one[name].get("mfu")) for one in (before, after)]
        if None in found:
            continue
        old, new = found
        fell = new < (1 - SLOWER) * old
        slower += fell
        print(f"{name:20} {old:6.2f} -> {new:6.2f}  {new / old - 1:+.0%}{'  SLOWER' if fell else ''}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
