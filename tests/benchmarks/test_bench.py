"""What `make bench` chooses, keeps and compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).with_name("bench.py")


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
