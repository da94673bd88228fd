"""Training on a stream resumes bit for bit: packed, cut into blocks, with data workers, and on other devices."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common import kinds
from luthier.common.check import check
from luthier.common.checkpoint import directory
from luthier.common.console import console
from luthier.common.inspect.run import inspect
from luthier.common.training import data
from luthier.common.training.run import train

STREAM = ("data.streaming=true", "data.buffer=7", "data.max_bad=0.5", "train.epochs=null")
PACKED = (
    "data.batch.packing=true", "data.batch.tokens=150", "train.accumulate=2", "train.steps=8", "checkpoint.every=1",
)  # fmt: skip
TEXTS = [{"text": f"The sum of {'two and ' * (number % 7)}three is {number}."} for number in range(20)]
RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "packed": ({"rows": 20, "model": "llama-dropout"}, (*PACKED, "task.neftune_alpha=5")),
    "workers": ({"rows": 20, "model": "llama-dropout"}, (*PACKED, "data.workers=2")),
    "mixed": ({"rows": 20}, (*PACKED, "optim.schedule=cosine")),
    "pretrain": (
        {"rows": TEXTS, "kind": "llm.pretrain"},
        ("data.max_length=40", "data.batch.examples=2", "train.accumulate=2", "train.steps=8", "checkpoint.every=1"),
    ),
}  # fmt: skip


def until(folder: Path, target: Path, step: int) -> Path:
    """The run as it was when it had just saved `step`."""
    shutil.copytree(folder, target, symlinks=True)
    for checkpoint in directory.committed(target / "checkpoints"):
        if directory.step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)
    return target


def place(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "run.json").read_text())["position"]["stream"]
    return found


def same(left: Any, folder: Path, whole: Path) -> None:
    """Losses, weights, optimizer, counters, and where the stream stands."""
    assert left.steps(folder) == left.steps(whole)
    for name in ("train/loss", "train/gradient_norm", "train/epoch"):
        assert left.curve(folder, name) == left.curve(whole, name)
    states = [
        torch.load(left.checkpoints(each)[-1] / "state" / "trainer.pt", weights_only=True) for each in (folder, whole)
    ]
    for name, value in states[1]["state_dict"].items():
        assert torch.equal(states[0]["state_dict"][name], value), name
    for one, other in zip(*(state["optimizer_states"][0]["state"].values() for state in states), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("exp_avg", "exp_avg_sq"))
    assert place(left.checkpoints(folder)[-1]) == place(left.checkpoints(whole)[-1])
    assert json.loads((folder / "data.json").read_text()) == json.loads((whole / "data.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_resumed_runs_are_bit_for_bit_the_same(name: str, recipe_of, left, rows_of, tmp_path: Path) -> None:
    """From the first, a middle and the last but one checkpoint; over several windows and more than one pass."""
    options, overrides = RUNS[name]
    if name == "mixed":
        first, second = rows_of(tmp_path / "first.jsonl", 20), rows_of(tmp_path / "second.jsonl", 9)
        overrides = (*overrides, f"data.train=[{first}, {{path: {second}, weight: 0.5}}]")
    overrides = (*STREAM, *overrides)
    whole = train(recipe_of(*overrides, **options)).folder
    steps = left.steps(whole)
    assert steps == list(range(1, 9))
    windows = [place(checkpoint)["window"] for checkpoint in left.checkpoints(whole)]
    assert windows == sorted(windows)
    assert windows[-1] >= 3
    for stop in (1, 4, 7):
        folder = until(whole, tmp_path / f"{name}-{stop}", stop)
        train(recipe_of(*overrides, **options).model_copy(update={"output": str(folder)}))
        same(left, folder, whole)


def test_on_two_devices_the_run_goes_on_with_the_same_batches(recipe_of, left, launch, tmp_path: Path) -> None:
    """One device with 4 batches a step, resumed on two with 2 each; sums over devices may be taken in another order."""
    overrides = (*STREAM, "data.batch.packing=true", "data.batch.tokens=150", "train.steps=4", "checkpoint.every=1")
    whole = train(recipe_of(*overrides, "train.accumulate=4", rows=20)).folder
    folder = until(whole, tmp_path / "two", 2)
    again = recipe_of(*overrides, "train.accumulate=2", "train.devices=2", rows=20)
    launch(tmp_path, [again.model_copy(update={"output": str(folder)})])
    assert left.steps(folder) == left.steps(whole)
    assert left.values(folder) == pytest.approx(left.values(whole), rel=1e-4)
    assert left.curve(folder, "train/epoch") == left.curve(whole, "train/epoch")
    assert place(left.checkpoints(folder)[-1]) == place(left.checkpoints(whole)[-1])


def test_continued_pretraining_loses_no_token_of_a_stream(recipe_of) -> None:
    """Each window of 7 texts is cut into blocks of 16, of which only the last is shorter; over 3 windows every token of
    rows 0 to 19 and of row 0 again is in exactly one."""
    recipe = recipe_of(
        *STREAM, "data.max_length=16", "data.batch.examples=2", "train.steps=99", rows=TEXTS, kind="llm.pretrain"
    )
    processing = kinds.task("llm.pretrain").make_processing(recipe)
    first = data.gather(recipe, processing, "train")
    plan = data.schedule(recipe, first, processing, 1, 1)
    blocks: dict[int, list[Any]] = {}
    for batch in plan.batches():
        if batch.epoch > 2:
            break
        blocks.setdefault(batch.epoch, []).extend(batch.examples)
    tokenizer = processing.tokenizer
    seen: Counter[int] = Counter()
    for number in range(3):
        sizes = sorted(len(block) for block in blocks[number])
        assert sizes[1:] == [16] * (len(sizes) - 1)
        seen.update(token for block in blocks[number] for one in block.documents for token in one.ids.tolist())
    texts = [row["text"] for row in [*TEXTS, TEXTS[0]]]
    written = [number for text in texts for number in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    assert seen == Counter(written)


def test_check_and_inspect_look_at_the_first_window(recipe_of, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(*STREAM, *PACKED, rows=20)
    with console.capture() as shown:
        inspect(recipe)
        assert check(recipe, fast=True)
    text = " ".join(shown.get().split())
    assert "train: first window, 7 rows, 7 examples" in text
    assert "first window, 7 rows" in text.partition("data.train")[2]
    assert "8 optimizer steps of 2 batches" in text


def test_a_run_reports_what_it_has_read(recipe_of, tmp_path: Path) -> None:
    recipe = recipe_of(*STREAM, *PACKED, rows=[*({"text": "The sum is five."} for _ in range(9)), {"nothing": 1}])
    folder = train(recipe).folder
    report = json.loads((folder / "data.json").read_text())["train"]
    assert report["rows"] == report["kept_rows"] + report["dropped"]["unknown_shape"]
    assert report["kept_rows"] == report["examples"]
    assert report["examples"] % 7 == 0
    assert report["examples"] > 9
    started = json.loads((folder / "run.json").read_text())
    assert started["data"]["train"]["bytes"] == {
        source.path: Path(source.path).stat().st_size for source in recipe.data.train
    }


def test_wrong_steps_name_the_rows_of_their_windows(recipe_of, tmp_path: Path) -> None:
    """With a learning rate that breaks the model every later step is left out, and named from the stream."""
    recipe = recipe_of(*STREAM, *PACKED, "optim.name=sgd", "optim.learning_rate=1e30", "train.max_skipped=99", rows=20)
    folder = train(recipe).folder
    lines = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    assert len(lines) >= 6
    processing = kinds.task("llm.sft").make_processing(recipe)
    first = data.gather(recipe, processing, "train")
    plan = data.schedule(recipe, first, processing, 1, 2)
    rows = {batch.number: [one.where for one in batch.examples] for batch in plan.batches()}
    for line in lines:
        assert line["batches"] == [2 * line["step"] - 2, 2 * line["step"] - 1]
        assert line["examples"] == [where for number in line["batches"] for where in rows[number]]
