"""The recipes that ship, at toy size: trained, stopped, resumed, evaluated."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from luthier.common import kinds, reading
from luthier.common.errors import ModelError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train

PAIRED = ("llm/dpo", "llm/orpo", "llm/simpo", "llm/reward")


class Stop(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def small(name: str, model_of: Any, rows_of: Any, folder: Path, output: str) -> Any:
    texts = [{"text": f"The sum of {'two and ' * (number % 7)}three is {number}."} for number in range(40)]
    pairs = [
        {"prompt": f"What of {at}?", "chosen": f"It is {'two ' * (at % 4)}five.", "rejected": "It is not."}
        for at in range(40)
    ]
    judged = [
        {"prompt": one["prompt"], "completion": one["chosen" if at % 2 else "rejected"], "label": at % 2}
        for at, one in enumerate(pairs)
    ]
    own = {"llm/pretrain": texts, "llm/kto": judged, **dict.fromkeys(PAIRED, pairs)}
    rows = rows_of(folder / "rows.jsonl", own.get(name, 40))
    batch = ["data.batch.examples=2"] if name == "llm/pretrain" else ["data.batch.tokens=160"]
    teacher = [f"model.teacher={model_of('llama', 'qwen3')}"] if name == "llm/distill" else []
    return reading.load(
        name,
        [*teacher, f"model.path={model_of('qwen3', 'qwen3')}", f"data.train={rows}", f"data.validation={rows}",
         "data.workers=0",
         "data.max_length=80", *batch, "train.accelerator=cpu", "train.threads=1", "train.accumulate=1",
         "train.log_every=1", f"optim.learning_rate={3e-3 if name in PAIRED else 1e-2}", "evaluate.at_start=true",
         f"output={folder / output}"],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llm/pretrain", "llm/sft", "llm/sft-lora", "llm/kto", "llm/distill", *PAIRED])
def test_a_shipped_recipe_trains_stops_resumes_and_is_evaluated(
    name: str, model_of, rows_of, left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)
    whole = train(small(name, model_of, rows_of, tmp_path, "whole")).folder
    stopped = small(name, model_of, rows_of, tmp_path, "stopped")
    assert train(stopped, [Stop()]).stopped_by == signal.SIGTERM
    assert train(stopped).stopped_by == 0
    folder = tmp_path / "stopped"
    assert left.curve(folder) == left.curve(whole)
    expected, found = left.weights(whole), left.weights(folder)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    losses = left.values(whole, "validation/loss")
    if name == "llm/distill":  # its teacher knows nothing of the data; what it learns is the teacher
        values = left.values(whole, "train/divergence")
        assert sum(values[-5:]) < 0.8 * sum(values[:5])
    else:
        assert min(losses) == losses[-1] < 0.95 * losses[0]
    metrics = evaluate_checkpoint(folder / "checkpoints" / "best").metrics
    assert metrics["loss"] == pytest.approx(min(losses), rel=1e-3)  # bfloat16


def test_qlora_needs_a_gpu(model_of, rows_of, tmp_path: Path) -> None:
    recipe = small("llm/sft-qlora", model_of, rows_of, tmp_path, "run")
    if torch.cuda.is_available():
        pytest.skip("here it would run")
    with pytest.raises(ModelError, match="a CUDA device"):
        kinds.task("llm.sft")(recipe)
    whole = reading.load("llm/sft-qlora", [f"model.path={model_of()}", "model.lora=null"])
    with pytest.raises(ModelError, match=r"4-bit weights can't be trained"):
        kinds.task("llm.sft")(whole)
