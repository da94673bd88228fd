"""What a user sees of the data before it is trained on: check, inspect, and the first batch of a run."""

from __future__ import annotations

import json
import re

import pytest

from luthier.common import check, console
from luthier.common.check.subject import largest
from luthier.common.inspect import terminal
from luthier.common.inspect.run import inspect
from luthier.common.training.run import train


@pytest.mark.parametrize("kind", ["llm.sft", "llm.pretrain"])
@pytest.mark.parametrize(
    "overrides", [(), ("model.lora.rank=2", "model.new_tokens=['<|note|>']")], ids=["whole", "lora"]
)
def test_check_passes_and_writes_nothing(kind, overrides, recipe_of, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(console.console, "width", 200)
    rows = [{"text": f"Rome is warm {number}"} for number in range(12)] if kind == "llm.pretrain" else 12
    recipe = recipe_of(*overrides, "data.batch.tokens=120", "data.batch.packing=true", "data.max_length=120",
                       kind=kind, rows=rows)  # fmt: skip
    passed = check.check(recipe, fast=True)
    said = capsys.readouterr().out
    assert passed, said
    assert "0% padding" in said
    assert "saved, reloaded, equal" in said
    assert not (tmp_path / "run").exists()


def test_the_largest_batch_is_that_with_most_tokens() -> None:
    """Joined documents cost what they have: 30 + 30 is more than 40 and 1, though less than twice 40."""
    from luthier.common.data.plan import Bounds, Plan

    costs = [40.0, 1.0, 30.0, 30.0]
    plan = Plan(costs, Bounds(2, joined=True), seed=1, epochs=1)
    assert {frozenset(batch.indices) for batch in plan.batches()} == {frozenset({0, 1}), frozenset({2, 3})}
    assert set(largest(plan).indices) == {2, 3}


def test_inspect_shows_every_token_and_which_carry_loss(recipe_of, capsys, task_of) -> None:
    recipe = recipe_of("data.batch.examples=3", rows=3)
    inspect(recipe)
    said = capsys.readouterr().out
    assert "batch 0: 3 examples, 0% padding" in said
    for number in range(3):
        assert f"run.jsonl:{number + 1}" in said
    tokens = [line for line in said.splitlines() if "<|im_start|>|" in line]
    assert len(tokens) >= 3
    assert "with loss" in said


def test_a_run_begins_with_its_first_batch_on_one_screen(recipe_of, capsys) -> None:
    """Between « and » where there is no colour: exactly the answers with their end tokens."""
    rows = [{"instruction": f"Rome {number}?", "output": f"sunny {number}"} for number in range(40)]
    train(recipe_of("data.batch.examples=40", rows=rows))
    said = capsys.readouterr().out
    begin, end = said.index("first batch, what carries loss"), said.index("step 1/1")
    screen = said[begin:end].splitlines()
    assert len(screen) <= terminal.SCREEN + 3
    shown = re.findall(r"run\.jsonl:(\d+)  .*?«(.*?)»", said[begin:end])
    assert len(shown) >= 3
    for row, answer in shown:
        assert answer == f"sunny {int(row) - 1}<|im_end|>"
    assert f"... and {40 - len(shown)} more" in screen[-1]


def test_long_stretches_are_shown_without_their_middle(task_of, monkeypatch, capsys) -> None:
    monkeypatch.setattr(console.console, "_color_system", None)
    words = " ".join(["Rome"] * 90)
    made = task_of(rows=[{"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "sunny"}]}])
    terminal.glance(made.task.processing, made.batch([0]))
    said = capsys.readouterr().out
    assert "«sunny<|im_end|>»" in said
    assert " ... " in said
    assert len(said) < 600


def test_the_same_run_with_and_without_being_looked_at(recipe_of, left, monkeypatch) -> None:
    """Making the first batch to show it draws nothing that the training draws."""
    shown = left.curve(train(recipe_of("data.batch.examples=4", "task.neftune_alpha=5", model="llama-dropout")).folder)
    monkeypatch.setattr("luthier.common.training.run.glance", lambda *_: None)
    recipe = recipe_of("data.batch.examples=4", "task.neftune_alpha=5", model="llama-dropout", output="unseen")
    unseen = left.curve(train(recipe).folder)
    assert json.dumps(shown) == json.dumps(unseen)


def test_pieces_of_a_tokenizer_with_spaces_in_its_tokens() -> None:
    """SentencePiece-like: decoded alone each token would lose the space that it begins with."""
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from luthier.modalities.llm.processing import pieces

    inner = Tokenizer(models.BPE({"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "▁b": 5}, [("▁", "a"), ("▁", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert pieces(tokenizer, tokenizer("a b a").input_ids) == ["a", " b", " a"]
