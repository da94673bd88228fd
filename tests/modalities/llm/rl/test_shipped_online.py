"""The shipped recipes of online reinforcement learning, at toy size: trained, stopped, resumed, evaluated."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common import reading
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train

QUICK = ("llm/grpo-tools", "llm/ppo")
OTHERS = ("llm/grpo", "llm/dapo", "llm/gspo", "llm/rloo", "llm/reinforce-plus-plus", "llm/grpo-server", "llm/grpo-ray")
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def small(name: str, model: Path, rows: Path, output: Path, *more: str) -> Any:
    short = "rewards=[{kind: number, by: last_number}, {kind: overlong, max_length: 8, cache: 4}]"
    limited = [short] if name == "llm/dapo" else []
    return reading.load(
        name,
        [f"model.path={model}", f"data.train={rows}", f"data.validation={rows}", "data.workers=0",
         "data.max_length=400", "data.batch.examples=2", "rollout.max_new_tokens=8", "train.accelerator=cpu",
         "train.threads=1", "train.epochs=null", "train.steps=4", "train.log_every=1", "train.precision='32'",
         "evaluate.batch=4", "evaluate.at_start=false", *limited, *more, f"output={output}"],
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_trains_stops_resumes_and_is_evaluated(
    name: str, model_of, rows_of, left, request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_before
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)
    asked = "question" if name == "llm/grpo-tools" else "prompt"
    rows = rows_of(tmp_path / "rows.jsonl", [{asked: f"What is {at} and 2?", "answer": str(at + 2)} for at in range(6)])
    model, more = model_of("qwen3", "qwen3"), []
    if name == "llm/grpo-server":
        place = request.getfixturevalue("serve")("vllm", str(model), "--logprobs-mode", "processed_logprobs")
        more = [f"rollout.engine.urls=['{place.url}']"]
    if name == "llm/grpo-ray":
        pytest.importorskip("ray")
        more = [f"rollout.placement.{one}" for one in ("address=local", "engines.gpus=0", "engines.cpus=0.5",
                                                       "rewards.number=2", "rewards.cpus=0.5")]  # fmt: skip
    recipe = small(name, model, rows, tmp_path / "run", *more)
    assert train(recipe, [stop_before(2)]).stopped_by == signal.SIGTERM
    assert train(recipe).stopped_by == 0
    losses = left.values(tmp_path / "run")
    assert len(losses) == 4
    assert all(one == one for one in losses)
    assert len(left.values(tmp_path / "run", "train/reward")) == 4
    metrics = evaluate_checkpoint(tmp_path / "run" / "checkpoints" / "best").metrics
    assert {"reward", "pass@1"} <= metrics.keys()
