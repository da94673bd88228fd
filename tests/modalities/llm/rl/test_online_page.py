"""What is left of an online training for reading: pass@k and rewards by slice, and its completions on the page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import pytest
from pyarrow import parquet

from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.report.page import write

ROWS = [
    {"prompt": f"What of {word}?", "topic": "even" if at % 2 else "odd", "answer": "e"}
    for at, word in enumerate(("weather", "Rome", "sunny", "warm", "city", "name"))
]


def test_pass_at_k_and_rewards_by_slice_and_completions_on_the_page(recipe_of, tmp_path: Path) -> None:
    recipe = recipe_of(
        "rewards=[{kind: regex, pattern: e, name: has_e}, {kind: overlong, max_length: 6, cache: 3, weight: 0}]",
        "data.max_length=60", "rollout.max_new_tokens=6", "rollout.num_generations=4", "data.batch.examples=2",
        "train.epochs=null", "train.steps=2", "evaluate.answers=4", "evaluate.pass_at=[1, 3]",
        "evaluate.sampling.temperature=1.0", "evaluate.slices=[topic]", "evaluate.at_start=true", "evaluate.every=2",
        f"data.validation={tmp_path}/run.jsonl", rows=ROWS, kind="llm.grpo",
    )  # fmt: skip
    folder = train(recipe).folder
    saved = json.loads((folder / "metrics.json").read_text())
    metrics = evaluate_checkpoint(folder / "checkpoints" / "best").metrics
    for name in ("reward", "reward/has_e", "reward/overlong", "pass@1", "pass@3"):
        assert saved[name] == pytest.approx(metrics[name], abs=1e-9), name
        both = [metrics["slices"]["topic"][value][name] for value in ("even", "odd")]
        assert sum(both) / 2 == pytest.approx(metrics[name], abs=1e-9), "three prompts in each, and all have a reward"
    assert metrics["pass@1"] == pytest.approx(metrics["reward"], abs=1e-9), "a reward of 1 is a pass"
    assert 0 < metrics["pass@1"] < metrics["pass@3"] <= 1, "a test of answers that differ"

    rows = [row for file in sorted((folder / "rollouts").iterdir()) for row in parquet.read_table(file).to_pylist()]
    assert len(rows) == 2 * 2 * 4
    for row in rows:
        assert row["reward"] == row["reward/has_e"] == float("e" in row["completion"])
        assert row["advantage"] * (row["reward"] - 0.5) >= 0
    write([folder], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for told in ("pass@3", "by topic", "Completions of its own", "advantage", "has_e"):
        assert told in text, told
    shown = [row for row in rows if len(row["completion"]) > 5 and escape(row["completion"].strip()) in text]
    assert {row["rollout"] for row in shown} == {0, 1}
