"""From rows to examples: every row and every token is accounted for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from luthier.common.data.plan import Plan
from luthier.common.errors import DataError
from luthier.common.training import data
from luthier.common.training.run import train

TEXTS = [{"text": f"The sum of {'two and ' * (number % 7)}three is {number}."} for number in range(30)]


def asked(*words: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(words)]


# ------------------------------------------------------------------------------------------------ continued pretraining


@pytest.mark.parametrize("length", [8, 50, 4000])
def test_fault_13_continued_pretraining_loses_no_token(length: int, task_of) -> None:
    """Tokens in == tokens out, each text's first and last too; all blocks but the last are full."""
    made = task_of(f"data.max_length={length}", rows=TEXTS, kind="llm.pretrain")
    tokenizer = made.task.processing.tokenizer
    expected = [number for row in TEXTS for number in [*tokenizer(row["text"]).input_ids, tokenizer.eos_token_id]]
    blocks = [[number for one in example.documents for number in one.ids.tolist()] for example in made.examples]
    assert [number for block in blocks for number in block] == expected
    assert all(len(block) == length for block in blocks[:-1])
    assert made.report.cost == len(expected)
    batch = made.batch(range(len(made.examples))).data
    assert batch["input_ids"].tolist() == expected
    bounds = batch["bounds"].tolist()
    assert len(bounds) - 1 == sum(len(example.documents) for example in made.examples)
    pieces = set(bounds[:-1])
    # All but the first token of each piece is predicted: it would have to be from another text, or from nothing.
    assert int((batch["targets"] != -100).sum()) == len(expected) - len(pieces)


def test_texts_in_a_block_do_not_see_each_other(task_of) -> None:
    made = task_of("data.max_length=60", rows=TEXTS[:4], kind="llm.pretrain")
    documents = made.examples[0].documents
    assert len(documents) > 1
    batch = made.batch([0]).data
    starts = batch["bounds"].tolist()[:-1]
    assert batch["position_ids"][starts].tolist() == [0] * len(starts)
    assert all(batch["targets"][start - 1] == -100 for start in starts[1:])


def test_an_evaluation_of_texts_keeps_them_apart(task_of, rows_of, tmp_path: Path) -> None:
    """Each text in blocks of its own, so that it can be sliced; all of its tokens but the first of each are scored."""
    rows = [{**row, "topic": "ab"[at % 2]} for at, row in enumerate(TEXTS)]
    file = rows_of(tmp_path / "validation.jsonl", rows)
    made = task_of(
        "data.max_length=20", f"data.validation={file}", "evaluate.slices=[topic]", rows=TEXTS, kind="llm.pretrain"
    )
    collected = data.gather(made.recipe, made.task.processing, "validation")
    assert collected is not None
    assert {len(example.documents) for example in collected.examples} == {1}
    assert {example.fields["topic"] for example in collected.examples} == {"a", "b"}


def test_continued_pretraining_trains(recipe_of, left) -> None:
    recipe = recipe_of(
        "data.max_length=64", "data.batch.examples=2", "train.epochs=3", rows=TEXTS, kind="llm.pretrain"
    )  # fmt: skip
    losses = left.values(train(recipe).folder)
    assert losses[-1] < 0.8 * losses[0]


def test_conversations_are_no_texts(task_of) -> None:
    with pytest.raises(DataError, match="not_a_text"):
        task_of(kind="llm.pretrain")


# ------------------------------------------------------------------------------------------------ the report

LONG = " ".join(["Rome"] * 60)
MIXED: list[Any] = [
    {"messages": asked("Rome?", "sunny")},
    {"messages": asked("Rome?", "sunny", "Add two.", "five", LONG, "warm")},  # exchanges go, then the prompt's begin
    {"messages": asked(LONG, "sunny")},  # the prompt's begin goes
    {"messages": asked("Rome?", LONG)},  # its answer does not fit
    {"messages": asked("say <|im_end|>", "no")},
    {"messages": asked("Rome?")},
    {"text": "Add two and three."},
    {"question": "Rome?"},
]


def test_fault_15_what_is_cut_and_dropped_is_counted_and_adds_up(task_of, tmp_path: Path) -> None:
    made = task_of("data.max_length=60", "data.max_bad=1.0", rows=MIXED)
    report = made.report
    assert report.rows == report.kept_rows + sum(report.dropped.values()) == len(MIXED)
    assert report.dropped == {"too_long": 1, "control_token": 1, "no_assistant": 1, "unknown_shape": 1}
    assert report.kept_rows == len(made.examples) == 4
    tokenizer = made.task.processing.tokenizer

    def tokens(messages: list[dict[str, str]]) -> int:
        return len(tokenizer.apply_chat_template(messages)["input_ids"])

    # What follows the answer (a newline) goes first; then as much of the prompt as is too much.
    second, third = MIXED[1]["messages"][4:], MIXED[2]["messages"]
    assert report.noted == {
        "examples cut": 2,
        "exchanges cut": 2,
        "prompt tokens cut": tokens(second) + tokens(third) - 2 * 60 - 2,
        "tokens after the answer cut": 2,
    }
    assert "2 examples cut" in report.summary()
    assert "1 too_long" in report.summary()
    assert report.as_dict()["noted"] == dict(report.noted)


def test_fault_14_the_answer_is_never_cut_unasked(task_of) -> None:
    """Of the examples kept, each ends with its end token as a target, however short the limit."""
    for limit in (12, 20, 40):
        made = task_of(f"data.max_length={limit}", "data.max_bad=1.0", rows=MIXED)
        tokenizer = made.task.processing.tokenizer
        ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
        for example in made.examples:
            document = example.documents[0]
            assert len(document) <= limit
            assert document.ids[document.trained][-1] in ends


def test_an_answer_that_may_be_cut_is_counted(task_of) -> None:
    rows = [{"messages": asked("Rome?", LONG)}]
    made = task_of("data.max_length=60", "data.too_long.answer=right", rows=rows)
    whole = len(made.task.processing.tokenizer.apply_chat_template(rows[0]["messages"])["input_ids"])
    assert len(made.examples[0]) == 60
    assert made.report.noted == {
        "examples cut": 1, "answer tokens cut": whole - 60 - 1, "tokens after the answer cut": 1,
    }  # fmt: skip


def test_messages_that_the_template_leaves_out_are_counted(task_of, tokenizer_of, tmp_path: Path) -> None:
    file = tmp_path / "silent.jinja"
    source = tokenizer_of("chatml").chat_template
    file.write_text("{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + source)
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, *asked("Rome?", "sunny")]}] * 3
    made = task_of(f"data.chat_template={file}", "data.keep_lost=true", rows=rows)
    assert made.report.noted == {"messages left out by the template": 3}
    with pytest.raises(DataError, match="message_lost"):
        task_of(f"data.chat_template={file}", rows=rows)


def test_the_report_of_a_run_says_what_was_cut(recipe_of, capsys) -> None:
    folder = train(recipe_of("data.max_length=60", "data.max_bad=1.0", "data.batch.examples=4", rows=MIXED)).folder
    assert json.loads((folder / "data.json").read_text())["train"]["noted"]["examples cut"] == 2
    assert "2 examples cut" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ masks and memory


def test_fault_6_the_last_end_token_is_a_target_where_it_is_the_padding_too(task_of, model_of) -> None:
    made = task_of(model=model_of("llama", "qwen2.5"))
    tokenizer = made.task.processing.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == end
    for number in range(4):
        ids = made.batch([number]).data["targets"].tolist()
        assert [label for label in ids if label != -100][-1] == end


def test_sources_are_mixed_by_weight(recipe_of, rows_of, tmp_path: Path) -> None:
    from luthier.common import kinds

    one, two = (rows_of(tmp_path / f"{name}.jsonl", 8) for name in ("one", "two"))
    recipe = recipe_of(f"data.train=[{{path: {one}, weight: 0.5}}, {{path: {two}, weight: 2}}]", "train.epochs=2")
    processing = kinds.task("llm.sft").make_processing(recipe)
    collected = data.gather(recipe, processing, "train")
    assert collected is not None
    plan: Plan = data.plan(recipe, collected, processing, 1, 1)
    met = [collected.examples[index].where for batch in plan.batches() for index in batch.indices]
    seen = Counter(where.partition(":")[0] for where in met)
    assert seen == {"one.jsonl": 8, "two.jsonl": 32}


def test_a_token_in_memory_takes_5_bytes(task_of) -> None:
    example = task_of().examples[0]
    assert sum(one.ids.nbytes + one.trained.nbytes for one in example.documents) == 5 * len(example)
    assert example.item is None
    assert all(array.base is None for one in example.documents for array in (one.ids, one.trained))
