"""What `make bench` chooses, keeps and compares."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NAMES = (
    "whisper_dynamic", "whisper_full", "paraformer", "nemo_ctc", "sft", "sft_packing", "dpo", "grpo", "reward",
    "mnrl_fp32", "mnrl_bf16", "rerank", "image_lora_fp32", "image_lora_bf16", "scaling_ddp_2", "scaling_fsdp2_4",
    "gpu_llama3_8b_lora",
)  # fmt: skip
BENCH = Path(__file__).with_name("bench.py")
ROOT = BENCH.parents[2]


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def files(tmp_path: Path) -> Any:
    def write(name: str, **ratios: float) -> Path:
        file = tmp_path / name
        file.write_text(json.dumps({"results": [{"name": key, "ratio": value} for key, value in ratios.items()]}))
        return file

    return write


def test_a_ratio_that_falls_by_over_15_percent_is_a_slowdown(files: Any) -> None:
    done = ran("--compare", files("a.json", sft=4.0, dpo=8.0, old=1.0), files("b.json", sft=3.3, dpo=7.0, new=1.0))
    assert done.returncode == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rows.keys() == {"sft", "dpo"}
    assert "SLOWER" in rows["sft"]  # 3.3 / 4.0 = 0.825
    assert "SLOWER" not in rows["dpo"]  # 7.0 / 8.0 = 0.875


def test_ratios_that_stay_are_no_slowdown(files: Any) -> None:
    done = ran("--compare", files("a.json", sft=4.0), files("b.json", sft=4.1))
    assert (done.returncode, "SLOWER" in done.stdout) == (0, False)


def test_an_unknown_name_lists_the_known_ones() -> None:
    done = ran("--only", "sftt")
    assert done.returncode == 1
    for name in ("sftt", "whisper_dynamic", "image_lora_bf16", "embedding"):
        assert name in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_name_chooses_its_comparison(name: str) -> None:
    chosen = bench().chosen([name])
    assert [name in one.names for one in chosen] == [True]


def test_without_names_all_but_the_gpu_are_run() -> None:
    module = bench()
    left_out = [one.group for one in module.COMPARISONS if one not in module.chosen([])]
    assert left_out == ["gpu"]


def test_dry_says_what_would_be_run() -> None:
    done = ran("--dry", "--only", "sft", "mnrl_bf16")
    lines = done.stdout.splitlines()
    assert [line.split(" : ")[0] for line in lines] == ["sft", "mnrl_bf16"]
    assert lines[0].endswith("sft.py --settings fp32 --repeats 3")


def test_each_script_finds_what_bench_asks_it_for() -> None:
    """All scripts run in one process, with everything left out that makes data or trains."""
    done = subprocess.run(
        [sys.executable, str(BENCH.with_name("dry_scripts.py"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    module = bench()
    asked = {name for one in module.COMPARISONS for name in one.names}
    assert asked >= set(NAMES)
    assert set(found) == asked


def test_the_readme_shows_the_results_that_are_kept() -> None:
    module = bench()
    tables = module.markdown(module.read(ROOT / "benchmarks.json"))
    assert len(tables) == 2
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [table in readme for table in tables] == [True, True]


def bench() -> Any:
    sys.path.insert(0, str(BENCH.parent))
    try:
        return importlib.import_module("bench")
    finally:
        sys.path.remove(str(BENCH.parent))
