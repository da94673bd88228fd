"""Optimizer steps: an update is that of the mean over all tokens with loss in the step, however they were cut up.

All runs use plain SGD, so that the change of the weights is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

from luthier.common.training.run import train

SGD = ("optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.learning_rate=0.1")


@pytest.fixture
def run(recipe_of, left) -> Callable[..., dict[str, Tensor]]:
    def make(output: str, *overrides: str, **options: Any) -> dict[str, Tensor]:
        outcome = train(recipe_of(*SGD, *overrides, output=output, **options))
        found: dict[str, Tensor] = left.weights(outcome.folder)
        return found

    return make


def close(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor] | None = None) -> None:
    """Equal to 1e-6, and further than that from the start."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert float((found[name] - expected[name]).abs().max()) <= 1e-6, name
    if start is not None:
        assert max(float((found[name] - start[name]).abs().max()) for name in found) > 1e-3


@pytest.fixture
def start(model_of) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(model_of() / "model.safetensors")
    return found


ROWS = 4


def test_fault_1_four_batches_of_one_equal_one_batch_of_four(run, start) -> None:
    """Conversations of 1 to 3 turns, so that the number of tokens with loss differs threefold."""
    many = run("many", "data.batch.examples=1", "train.accumulate=4", rows=ROWS)
    one = run("one", "data.batch.examples=4", rows=ROWS)
    close(many, one, start)


def test_fault_1_the_update_is_that_of_transformers_loss(run, task_of, model_of) -> None:
    """One step by hand: lr times the gradient of the sum of all tokens' losses by their number, one by one."""
    made = task_of(rows=ROWS)
    theirs = hf.AutoModelForCausalLM.from_pretrained(model_of(), attn_implementation="eager", dtype=torch.float32)
    batches = [made.batch([number]).data for number in range(ROWS)]
    count = sum(int((data["targets"] != -100).sum()) for data in batches)
    for data in batches:
        labels = torch.cat([torch.tensor([-100]), data["targets"][:-1]])[None]
        theirs(input_ids=data["input_ids"][None], labels=labels, num_items_in_batch=count).loss.backward()
    expected = {name: parameter.detach() - 0.1 * parameter.grad for name, parameter in theirs.named_parameters()}
    close(run("by-hand", "data.batch.examples=1", "train.accumulate=4", rows=ROWS), expected)


def test_fault_2_the_last_window_is_divided_by_what_it_holds(run, left, tmp_path: Path) -> None:
    """6 batches, 4 in a step: the second step equals one batch of the last 2."""
    many = run("many", "data.batch.examples=1", "train.accumulate=4", rows=6)
    assert [step for step, _ in left.curve(tmp_path / "many")] == [1, 2]
    close(many, run("few", "data.batch.examples=4", rows=6))
    assert left.values(tmp_path / "many") == pytest.approx(left.values(tmp_path / "few"), rel=1e-6)


def test_packing_changes_the_batches_and_nothing_else(run, start, left, tmp_path: Path) -> None:
    """All of the data in a step, packed into several batches of 200 tokens, or 12 documents one after the other."""
    packed = run("packed", "data.batch.packing=true", "data.batch.tokens=200", "train.accumulate=99")
    close(packed, run("joined", "data.batch.examples=12"), start)
    assert left.values(tmp_path / "packed") == pytest.approx(left.values(tmp_path / "joined"), rel=1e-6)


def test_a_bound_in_tokens_changes_the_batches_and_nothing_else(run) -> None:
    bounded = run("bounded", "data.batch.tokens=200", "data.batch.examples=99", "train.accumulate=99")
    close(bounded, run("joined", "data.batch.examples=12"))


# ------------------------------------------------------------------------------------------------ processes

LORA = ("model.lora.target_modules=[q_proj, v_proj, lm_head]", "model.lora.rank=2")
TWO = ("train.devices=2", "train.accumulate=2", "data.batch.examples=1")
JOBS: dict[str, tuple[str, ...]] = {
    "ddp": ("train.strategy=ddp",),
    "ddp-lora": ("train.strategy=ddp", *LORA),
    "ddp-checkpointing": ("train.strategy=ddp", *LORA, "train.gradient_checkpointing=true"),
    "fsdp2": ("train.strategy=fsdp2",),
    "fsdp2-lora": ("train.strategy=fsdp2", *LORA),
    "fsdp2+tp": ("train.strategy=fsdp2+tp", "train.tensor_parallel=2", "train.accumulate=4"),
    "ddp-packed": ("train.strategy=ddp", "data.batch.packing=true", "data.batch.tokens=150"),
    "ddp-tied": ("train.strategy=ddp",),
    "fsdp2-tied": ("train.strategy=fsdp2",),
    "ddp-mixtral": ("train.strategy=ddp",),
    "ddp-dpo": ("train.strategy=ddp", "task.loss=[sigmoid, {name: ipo, weight: 0.1}]", "task.sft_weight=0.1"),
    "ddp-dpo-lora": ("train.strategy=ddp", *LORA, "task.precompute_reference=true"),
    "fsdp2-dpo-lora": ("train.strategy=fsdp2", *LORA),
}
KINDS = {name: "llm.dpo" for name in JOBS if "dpo" in name}
PAIRS = [
    {"prompt": f"What of {number}?", "chosen": f"It is {'two ' * (number % 4)}five.", "rejected": "It is not."}
    for number in range(10)
]
MODEL = {"ddp-tied": "llama-tied", "fsdp2-tied": "llama-tied", "ddp-mixtral": "mixtral"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, rows_of, model_of, launch, tree_of) -> Path:
    """All of these trainings on 2 processes in one launch, as starting them takes longest."""
    root = tmp_path_factory.mktemp("two")
    rows = rows_of(root / "rows.jsonl", 10)
    recipes = []
    pairs = rows_of(root / "pairs.jsonl", PAIRS)
    for name, overrides in JOBS.items():
        given = pairs if name in KINDS else rows
        overrides = (f"data.validation={given}", "evaluate.batch=3", *overrides)
        kind, model = KINDS.get(name, "llm.sft"), model_of(MODEL.get(name, "llama"))
        recipes.append(tree_of(model, given, root / name, *SGD, *TWO, *overrides, kind=kind))
    launch(root, recipes)
    return root


@pytest.mark.parametrize("name", JOBS)
def test_fault_3_two_processes_equal_one(name: str, two: Path, run, left, tmp_path: Path) -> None:
    """10 conversations, 4 a step: the last step has 2. Ranks have different numbers of tokens with loss."""
    rows = two / ("pairs.jsonl" if name in KINDS else "rows.jsonl")
    given = [one for one in JOBS[name] if not one.startswith(("train.strategy", "train.tensor"))]
    alone = ("data.batch.examples=1", f"data.validation={rows}", "evaluate.batch=10", *given, "train.accumulate=4")
    expected = run("alone", *alone, rows=rows, model=MODEL.get(name, "llama"), kind=KINDS.get(name, "llm.sft"))
    close(left.weights(two / name), expected)
    for curve in ("train/loss", "train/gradient_norm", "validation/loss", "validation/accuracy"):
        found, wanted = (left.values(folder, curve) for folder in (two / name, tmp_path / "alone"))
        assert len(wanted) >= 1
        assert found == pytest.approx(wanted, rel=1e-6), curve
