"""The recipes that ship, at toy size: trained, stopped, resumed, evaluated."""

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

SINGLE = ("llm/pretrain", "llm/sft", "llm/sft-lora", "llm/sft-qlora", "llm/kto", "llm/prm")
PAIRED = ("llm/dpo", "llm/dpo-adapter", "llm/orpo", "llm/simpo", "llm/reward")
DISTILLED = ("llm/distill", "llm/distill-stored", "llm/distill-on-policy")


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
    solved = [
        {"prompt": one["prompt"], "completions": [one["chosen"], one["rejected"]][: 1 + at % 2], "labels": labels}
        for at, one in enumerate(pairs)
        for labels in [[True, False][: 1 + at % 2]]
    ]
    own = {"llm/pretrain": texts, "llm/kto": judged, "llm/prm": solved, **dict.fromkeys(PAIRED, pairs)}
    rows = rows_of(folder / "rows.jsonl", own.get(name, 40))
    batch = ["data.batch.examples=2"] if name == "llm/pretrain" else ["data.batch.tokens=160"]
    rate = 1e-3 if name == "llm/distill-on-policy" else 3e-3 if name in PAIRED else 1e-2
    more = [f"model.teacher={model_of('llama', 'qwen3')}"] if name in DISTILLED else []
    if name == "llm/distill-on-policy":
        more += ["task.max_new_tokens=4", "train.epochs=2"]
    if name == "llm/dpo-adapter":
        more.append(f"model.adapter={adapter(model_of('qwen3', 'qwen3'), folder / 'adapter')}")
    return reading.load(
        name,
        [*more, f"model.path={model_of('qwen3', 'qwen3')}", f"data.train={rows}", f"data.validation={rows}",
         "data.workers=0",
         "data.max_length=80", *batch, "train.accelerator=cpu", "train.threads=1", "train.accumulate=1",
         "train.log_every=1", f"optim.learning_rate={rate}", "evaluate.at_start=true",
         f"output={folder / output}"],
    )  # fmt: skip


def adapter(model: Path, folder: Path) -> Path:
    """A saved adapter of a model, that changes it a little."""
    import peft
    import transformers as hf

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    base = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft.get_peft_model(base, config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SINGLE, *DISTILLED, *PAIRED])
def test_the_check_finds_nothing_in_a_shipped_recipe(
    name: str, model_of, rows_of, finds_nothing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert finds_nothing(small(name, model_of, rows_of, tmp_path, "run"))


@pytest.mark.parametrize(
    "name", ["llm/pretrain", "llm/sft", "llm/sft-lora", "llm/sft-qlora", "llm/kto", "llm/prm", *DISTILLED, *PAIRED]
)
def test_a_shipped_recipe_trains_stops_resumes_and_is_evaluated(
    name: str, model_of, rows_of, left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_before
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)
    whole = train(small(name, model_of, rows_of, tmp_path, "whole")).folder
    stopped = small(name, model_of, rows_of, tmp_path, "stopped")
    assert train(stopped, [stop_before(2)]).stopped_by == signal.SIGTERM
    assert train(stopped).stopped_by == 0
    folder = tmp_path / "stopped"
    assert left.curve(folder) == left.curve(whole)
    expected, found = left.weights(whole), left.weights(folder)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    decides = "divergence" if name in DISTILLED else "loss"  # the teacher knows nothing of the data
    losses = left.values(whole, f"validation/{decides}")
    assert min(losses) == losses[-1] < 0.95 * losses[0]
    metrics = evaluate_checkpoint(folder / "checkpoints" / "best").metrics
    assert metrics[decides] == pytest.approx(min(losses), rel=1e-3)  # bfloat16
