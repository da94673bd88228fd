"""Mistakes that `luthier check` finds before a language model is trained, and recipes of which it finds none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
BROKEN = "{% for m in messages %}{{ m['content'] }}"


def talk(number: int, answer: str = "It is sunny.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"What of {number}?"}, {"role": "assistant", "content": answer}]}


TALKS = [talk(number) for number in range(12)]
PAIRS = [{"prompt": f"What of {at}?", "chosen": f"It is {at}.", "rejected": "No."} for at in range(12)]
JUDGED = [{"prompt": f"What of {at}?", "completion": f"It is {at}.", "label": at % 2} for at in range(12)]
ASKED = [{"prompt": f"What of {at}?", "answer": str(at)} for at in range(12)]

# name: (kind, rows, overrides, what is said)
PLANTED: dict[str, tuple[str, list[Any], list[str], str]] = {
    "template without an end": ("llm.sft", TALKS, ["data.chat_template=NO_END"], "no end token"),
    "template that is not valid": ("llm.sft", TALKS, ["data.chat_template=BROKEN"], "chat template is not valid"),
    "no such template": ("llm.sft", TALKS, ["data.chat_template=nowhere.jinja"], "no such file"),
    "mask empty": ("llm.sft", TALKS, ["data.roles=[tool]"], "12 no_target"),
    "answers cut": (
        "llm.sft", [talk(at, "It is sunny and warm. " * 9) for at in range(12)],
        ["data.max_length=24", "data.too_long.answer=right"], "most answers are cut",
    ),
    "too long": (
        "llm.sft", [talk(at, "It is sunny and warm. " * 9) for at in range(12)], ["data.max_length=24"], "12 too_long",
    ),
    "control token in a text": ("llm.sft", [talk(at, "Yes <|im_end|>.") for at in range(12)], [], "12 control_token"),
    "unknown columns": ("llm.sft", [{"body": "a"}, {"body": "b"}], [], "2 unknown_shape"),
    "no such file": ("llm.sft", TALKS, ["data.train=nowhere.jsonl"], "no such"),
    "no rows": ("llm.sft", [], [], "holds no rows"),
    "adapter target": ("llm.sft", TALKS, ["model.lora.target_modules=[kv_b_proj]"], "kv_b_proj"),
    "adapter in the model's place": ("llm.sft", TALKS, ["model.path=ADAPTER"], "this is an adapter and not a model"),
    "no such model": ("llm.sft", TALKS, ["model.path=/nowhere"], "can't be loaded"),
    "token that is not new": ("llm.sft", TALKS, ["model.new_tokens=['<|im_end|>']"], "has these tokens already"),
    "4 bits without adapter": ("llm.sft", TALKS, ["model.quantization=nf4"], "4-bit weights can't be trained"),
    "learning rate of zero": ("llm.sft", TALKS, ["optim.learning_rate=0"], "greater than 0"),
    "learning rate too high": ("llm.sft", TALKS, ["optim.learning_rate=30", "optim.name=sgd"], "does not stay finite"),
    "warm-up as long as the training": ("llm.sft", TALKS, ["optim.warmup=100"], "the warm-up is as long"),
    "metric key": ("llm.sft", TALKS, ["checkpoint.best=wer"], "no such metric"),
    "metric that is not asked for": ("llm.sft", TALKS, ["checkpoint.best=exact_match"], "does not give this metric"),
    "batch below the longest": ("llm.sft", TALKS, ["data.batch.tokens=5"], "longest example alone exceeds"),
    "unknown key": ("llm.sft", TALKS, ["optim.lr=1e-4"], "unknown key"),
    "tensor parallel alone": ("llm.sft", TALKS, ["train.tensor_parallel=2"], "the strategy can't work here"),
    "equal answers": ("llm.dpo", [{**one, "rejected": one["chosen"]} for one in PAIRS], [], "12 equal_answers"),
    "unpaired preferences": ("llm.dpo", [{"prompt": "a", "chosen": "b"}] * 3, [], "3 unknown_shape"),
    "reference with other tokens": ("llm.dpo", PAIRS, ["model.reference=OTHER"], "has another tokenizer"),
    "teacher with other tokens": ("llm.distill", TALKS, ["model.teacher=OTHER"], "has another tokenizer"),
    "one label only": ("llm.kto", [{**one, "label": True} for one in JUDGED], [], "every label is the same"),
    "label that is none": ("llm.kto", [{**one, "label": "good"} for one in JUDGED], [], "12 bad_label"),
    "no room for a completion": (
        "llm.grpo", ASKED, ["rewards=[{kind: format}]", "data.max_length=20", "rollout.max_new_tokens=20"],
        "is no more than rollout.max_new_tokens",
    ),
    "no such reward": ("llm.grpo", ASKED, ["rewards=[{kind: nice}]"], "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str, recipe_of, model_of, tokenizer_of, failures, tmp_path: Path) -> None:
    kind, rows, overrides, said = PLANTED[name]
    places = {"NO_END": tmp_path / "no_end.jinja", "BROKEN": tmp_path / "broken.jinja", "ADAPTER": tmp_path / "adapter"}
    places["NO_END"].write_text(NO_END)
    places["BROKEN"].write_text(BROKEN)
    places["ADAPTER"].mkdir()
    tokenizer_of("chatml").save_pretrained(places["ADAPTER"])
    (places["ADAPTER"] / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))

    def make() -> Any:
        given = [part.replace("OTHER", str(model_of("llama", "qwen3"))) for part in overrides]
        for key, place in places.items():
            given = [part.replace(f"={key}", f"={place}") for part in given]
        return recipe_of(*given, rows=rows, kind=kind)

    found = failures(make)
    assert any(said in one for one in found), found
    assert len(found) == 1, "one mistake is one failure"


def test_training_data_among_the_test_data_are_found(recipe_of, rows_of, failures, tmp_path: Path) -> None:
    test = rows_of(tmp_path / "test.jsonl", [talk(99), TALKS[3], talk(98)])
    (found,) = failures(lambda: recipe_of(f"data.test={test}", rows=TALKS))
    assert "examples that the model is judged by are in the training data too" in found
    assert "data.test: 1 of 3 examples, such as" in found
    assert "test.jsonl:2" in found


def states(found: dict[str, Any]) -> dict[str, str]:
    return {question["question"]: question["state"] for question in found["questions"]}


def names(found: dict[str, Any], state: str) -> set[str]:
    return {one["name"] for question in found["questions"] for one in question["answers"] if one["state"] == state}


@pytest.mark.slow
def test_all_ten_questions_are_answered(recipe_of, rows_of, checked, tmp_path: Path) -> None:
    held = [rows_of(tmp_path / f"{name}.jsonl", [talk(at) for at in range(begin, begin + 4)])
            for name, begin in (("validation", 40), ("regression", 50))]  # fmt: skip
    recipe = recipe_of(
        "model.lora.rank=4", "model.lora.target_modules=all-linear", f"data.validation={held[0]}",
        f"data.regression={held[1]}", rows=TALKS,
    )  # fmt: skip
    found = checked(recipe, fast=False)
    assert set(states(found).values()) == {"pass"}, found
    assert names(found, "n/a") == set()
    assert not (tmp_path / "run").exists(), "the check leaves nothing behind"
    assert not list(tmp_path.glob(".luthier-check-*"))
