"""A run that was stopped goes on bit for bit as if it had not been, with the same data and the same masks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common.checkpoint import directory
from luthier.common.training.run import train

TWICE = ("train.accumulate=2", "train.epochs=2", "checkpoint.every=1")
PACKED = ("data.batch.packing=true", "data.batch.tokens=120", *TWICE)
TEXTS = [{"text": f"The sum of {'two and ' * (number % 7)}three is {number}."} for number in range(40)]
PAIRS = [
    {"prompt": f"What of {number}?", "chosen": f"It is {'two ' * (number % 4)}five.", "rejected": "It is not."}
    for number in range(20)
]
RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "packed": ({"rows": 20, "model": "llama-dropout"}, (*PACKED, "task.neftune_alpha=5")),
    "lora": (
        {"rows": 20, "model": "llama-dropout"},
        (*PACKED, "model.lora.rank=2", "model.lora.dropout=0.3", "model.new_tokens=['<|note|>']",
         "train.gradient_checkpointing=true"),
    ),
    "pretrain": (
        {"rows": TEXTS, "model": "llama-dropout", "kind": "llm.pretrain"},
        ("data.max_length=40", "data.batch.examples=3", *TWICE),
    ),
    "dpo": (
        {"rows": PAIRS, "model": "llama-dropout", "kind": "llm.dpo"},
        ("data.batch.tokens=120", "model.lora.rank=2", "model.lora.dropout=0.3", *TWICE),
    ),
    "dpo-precomputed": (
        {"rows": PAIRS, "model": "llama-dropout", "kind": "llm.dpo"},
        (*PACKED, "task.precompute_reference=true"),
    ),
    "qlora": (
        {"rows": 20, "model": "llama-dropout"},
        (*PACKED, "model.quantization=nf4", "model.lora.rank=2", "optim.name=adamw_8bit"),
    ),
    "mixed": (
        {"rows": 20, "model": "mixtral"},
        ("data.batch.tokens=120", *TWICE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_resumed_runs_are_bit_for_bit_the_same(name: str, recipe_of, left, rows_of, tmp_path: Path) -> None:
    """From the first, a middle and the last but one checkpoint: losses, weights and optimizer state."""
    options, overrides = RUNS[name]
    if name == "mixed":  # of one source each row, of another two copies and a half
        second = rows_of(tmp_path / "second.jsonl", 7)
        rows = rows_of(tmp_path / "first.jsonl", options["rows"])
        overrides = (*overrides, f"data.train=[{rows}, {{path: {second}, weight: 2.5}}]")
    whole = train(recipe_of(*overrides, **options)).folder
    steps = left.steps(whole)
    assert len(steps) >= 5
    state = torch.load(left.checkpoints(whole)[-1] / "state" / "trainer.pt", weights_only=True)
    for stop in (steps[0], steps[len(steps) // 2], steps[-2]):
        folder = tmp_path / f"{name}-{stop}"
        shutil.copytree(whole, folder, symlinks=True)
        for checkpoint in directory.committed(folder / "checkpoints"):
            if directory.step_of(checkpoint) > stop:
                shutil.rmtree(checkpoint)
        again = recipe_of(*overrides, **options).model_copy(update={"output": str(folder)})
        train(again)
        assert left.steps(folder) == steps
        assert left.curve(folder) == left.curve(whole)
        expected, found = left.weights(whole), left.weights(folder)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        resumed = torch.load(left.checkpoints(folder)[-1] / "state" / "trainer.pt", weights_only=True)
        same(resumed["optimizer_states"], state["optimizer_states"])


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


def test_dropout_acts_in_training_and_is_a_function_of_the_batch(task_of) -> None:
    made = task_of(model="llama-dropout")
    made.task.train_mode()
    data = made.batch([0, 1]).data

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(made.task.loss(data).sum.detach())

    assert loss(0) == loss(0) != loss(1)
    made.task.eval()
    assert loss(0) == loss(1)


def test_fault_16_another_template_gives_other_tokens_at_once(task_of, tokenizer_of, tmp_path: Path) -> None:
    """Tokens are made at the start of every run and kept in memory only: there is no cache that could be stale."""
    template = tmp_path / "template.jinja"
    template.write_text(tokenizer_of("chatml").chat_template)
    first = task_of(f"data.chat_template={template}").examples[0].documents[0].ids.tolist()
    template.write_text(tokenizer_of("chatml").chat_template.replace("<|im_start|>", "<|im_start|>the "))
    second = task_of(f"data.chat_template={template}").examples[0].documents[0].ids.tolist()
    assert first != second
    assert not [path for path in tmp_path.rglob("*") if path.suffix not in (".jinja", ".jsonl")]
