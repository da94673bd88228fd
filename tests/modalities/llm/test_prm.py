"""Process reward models: which tokens are scored, transformers' own scores, the loss, metrics, the head."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from sklearn.metrics import accuracy_score, f1_score

from luthier.common.errors import LuthierError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.modalities.llm.prm.task import Steps

KIND = "llm.prm"
LORA = ("model.lora.target_modules=[q_proj, v_proj]", "model.lora.rank=2")


def row(number: int) -> dict[str, Any]:
    """Two to four steps; those that say `not` are wrong."""
    steps = [
        f"Add {'two ' * (number % 3)}and three{' not' * ((number + at) % 3 == 0)}." for at in range(2 + number % 3)
    ]
    return {
        "prompt": f"What of {number}?", "completions": steps, "labels": ["not" not in one for one in steps],
        "topic": "even" if number % 2 == 0 else "odd",
    }  # fmt: skip


ROWS = [row(number) for number in range(10)]


@pytest.fixture
def made(task_of):
    def make(*overrides: str, rows: Any = ROWS, **options: Any) -> Any:
        return task_of(*overrides, kind=KIND, rows=rows, **options)

    return make


def trl_row(fields: dict[str, Any], tokenizer: Any, separator: str) -> tuple[list[int], list[int]]:
    """(ids, labels) as TRL 1.16's PRMTrainer.tokenize_row makes them, without truncation: prompt, then each step with
    the separator, all tokenised alone; the label stands at the last token of a separator, elsewhere -100."""
    ids = tokenizer(fields["prompt"], add_special_tokens=False).input_ids
    labels = [-100] * len(ids)
    for step, label in zip(fields["completions"], fields["labels"], strict=True):
        part = [tokenizer(one, add_special_tokens=False).input_ids for one in (step, separator)]
        ids += part[0] + part[1]
        labels += [-100] * (len(part[0]) + len(part[1]) - 1) + [int(label)]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return bos + ids, [-100] * len(bos) + labels


# ------------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("separator", ["\n", " ки", "<|endoftext|>"])
def test_fault_18_plain_rows_are_tokenised_and_read_as_by_trl(separator: str, made) -> None:
    """Also where the separator is the end token and the padding."""
    built = made("data.plain=true", f"task.step_separator={json.dumps(separator)}")
    tokenizer = built.task.processing.tokenizer
    data = built.batch([0, 1, 5]).data
    expected = [trl_row(ROWS[at], tokenizer, separator) for at in (0, 1, 5)]
    assert data["input_ids"].tolist() == [number for ids, _ in expected for number in ids]
    labels = np.array([label for _, row in expected for label in row])
    assert data["steps"].tolist() == np.flatnonzero(labels != -100).tolist()
    assert data["step_labels"].tolist() == labels[labels != -100].tolist()
    assert data["steps_of"] == [2, 3, 4]


def test_a_prompt_is_written_by_the_chat_template(made, tokenizer_of) -> None:
    """A text or messages; the steps follow where an answer begins, and the last separator ends the row."""
    said = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": ROWS[0]["prompt"]}]
    built = made(rows=[ROWS[0], {**ROWS[0], "prompt": said}])
    texts = [tokenizer_of("chatml").decode(one.documents[0].ids) for one in built.examples]
    steps = "".join(f"{step}\n" for step in ROWS[0]["completions"])
    asked = f"<|im_start|>user\n{ROWS[0]['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [asked + steps, f"<|im_start|>system\nYou are helpful.<|im_end|>\n{asked}{steps}"]
    shown = built.task.processing.show(built.batch([0]).data, 0)
    assert [piece for piece, carries in shown.tokens if carries] == ["\n"] * 2


def test_the_prompt_is_cut_before_the_steps(made) -> None:
    long = {**ROWS[2], "prompt": "Rome is warm. " * 40}
    whole, short = (made(f"data.max_length={size}", rows=[long]).batch([0]).data for size in (250, 60))
    assert len(short["input_ids"]) == 60
    begin = int(short["steps"][0])
    assert torch.equal(short["input_ids"][begin - 5 :], whole["input_ids"][int(whole["steps"][0]) - 5 :])
    assert short["step_labels"].tolist() == whole["step_labels"].tolist()
    part = made("data.max_length=20", "data.too_long.answer=right", rows=[ROWS[2]]).batch([0]).data
    assert 0 < part["steps_of"][0] < len(ROWS[2]["labels"])
    assert part["steps_of"] == [len(part["steps"])] == [len(part["step_labels"])]


def test_rows_that_can_t_be_used_are_counted(made) -> None:
    bad = [{**ROWS[0], "labels": [True]}, {**ROWS[0], "labels": ["yes", "no"]}, {**ROWS[0], "completions": ["a", " "]},
           {"prompt": "a", "completions": ["b"]}]  # fmt: skip
    report = made("data.max_bad=0.5", rows=[*ROWS, *bad]).report
    assert report.dropped == {"bad_label": 2, "empty_step": 1, "missing_field": 1}
    assert report.kept_rows == len(ROWS)


# ------------------------------------------------------------------------------------------------ scores and loss


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "phi3", "gpt2"])
def test_loss_and_gradients_equal_transformers(family: str, made, tmp_path: Any) -> None:
    """Solutions in one row, against each alone in transformers' class, whose own loss is TRL's: the mean cross-entropy
    of the labelled tokens."""
    built = made(model=family)
    built.task.save_pretrained(tmp_path)
    built.task.train_mode()
    numbers = [0, 1, 2, 7]
    data = built.batch(numbers).data
    loss = built.task.loss(data)
    (loss.sum / loss.count).backward()
    model = hf.AutoModelForTokenClassification.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    total = torch.zeros(())
    for number in numbers:
        one = built.batch([number]).data
        logits = model(input_ids=one["input_ids"][None], use_cache=False).logits[0][one["steps"]]
        total = total + torch.nn.functional.cross_entropy(logits, one["step_labels"], reduction="sum")
    assert loss.count == sum(len(ROWS[number]["labels"]) for number in numbers)
    assert float(loss.sum.detach()) == pytest.approx(float(total.detach()), rel=1e-4)
    (total / loss.count).backward()
    wanted = dict(model.named_parameters())
    largest = max(float(one.grad.abs().max()) for one in wanted.values() if one.grad is not None)
    for name, parameter in built.task.model.named_parameters():
        if wanted[name].grad is None:
            continue
        apart = (parameter.grad - wanted[name].grad).abs()
        if name.endswith(("embed_tokens.weight", "wte.weight")):  # transformers gives the padding's row no gradient
            apart[model.config.pad_token_id] = 0
        assert float(apart.max()) <= 2e-5 * largest, name


@pytest.mark.parametrize("overrides", [(), LORA], ids=["full", "lora"])
def test_fault_18_the_head_is_saved_also_with_an_adapter(overrides: tuple[str, ...], recipe_of, task_of, left) -> None:
    recipe = recipe_of(*overrides, kind=KIND, rows=ROWS)
    folder = train(recipe).folder
    again = task_of(*overrides, kind=KIND, rows=ROWS, weights=left.model(folder))
    fresh = task_of(*overrides, kind=KIND, rows=ROWS)
    data = again.batch([0, 1]).data
    found = again.task._scored(data)[0].detach()
    assert float((found - fresh.task._scored(data)[0].detach()).abs().max()) > 1e-3
    if overrides:
        from peft import PeftModel

        base = hf.AutoModelForTokenClassification.from_pretrained(recipe.model.path, num_labels=2, dtype=torch.float32)
        model: Any = PeftModel.from_pretrained(base, str(left.model(folder))).eval()
    else:
        model = hf.AutoModelForTokenClassification.from_pretrained(left.model(folder), dtype=torch.float32).eval()
        assert model.config.id2label == {0: "wrong", 1: "right"}
    with torch.no_grad():
        parts = data["input_ids"].split(data["bounds"].diff().tolist())
        logits = torch.cat([model(input_ids=one[None], use_cache=False).logits[0] for one in parts])
    torch.testing.assert_close(found, logits[data["steps"]], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ evaluation


def test_metrics_are_sklearn_s(made) -> None:
    task = made().task
    random = np.random.default_rng(0)
    records = []
    for _ in range(20):
        labels = random.random(int(random.integers(1, 6))) < 0.6
        given = np.where(random.random(len(labels)) < 0.7, labels, ~labels)
        records.append(Steps(0.5 * len(labels), tuple(np.where(given, 0.9, 0.2)), tuple(labels.tolist())))
    found = task.means(records)
    given, labels = ([one for record in records for one in getattr(record, name)] for name in ("given", "labels"))
    assert found["loss"] == pytest.approx(0.5)
    assert found["count"] == len(labels)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, given))
    assert found["f1"] == pytest.approx(f1_score(labels, given))
    assert found["f1_wrong"] == pytest.approx(f1_score(labels, given, pos_label=False))
    firsts = [[next((at for at, one in enumerate(part) if not one), None) for part in (record.given, record.labels)]
              for record in records]  # fmt: skip
    assert found["first_error"] == pytest.approx(np.mean([one == other for one, other in firsts]))
    assert 0 < found["first_error"] < 1


def test_it_learns_and_is_evaluated_by_slice(recipe_of, rows_of, left, tmp_path: Any) -> None:
    file = rows_of(tmp_path / "validation.jsonl", ROWS)
    overrides = (
        f"data.validation={file}", "evaluate.slices=[topic]", "evaluate.at_start=true", "train.epochs=10",
        "optim.learning_rate=3e-3", "data.batch.examples=5",
    )  # fmt: skip
    folder = train(recipe_of(*overrides, kind=KIND, rows=ROWS)).folder
    losses = left.values(folder, "validation/loss")
    assert losses[-1] < 0.7 * losses[0]
    one, many = (
        evaluate_checkpoint(folder / "checkpoints" / "last", overrides=[f"evaluate.batch={size}"]).metrics
        for size in (1, 8)
    )
    assert one["loss"] == pytest.approx(many["loss"], rel=1e-4) == pytest.approx(losses[-1], rel=1e-4)
    assert one["f1"] == many["f1"] > 0.8
    assert set(one["slices"]["topic"]) == {"even", "odd"}
    assert sum(part["count"] for part in one["slices"]["topic"].values()) == one["count"]


def test_adapters_of_language_models_are_refused(recipe_of) -> None:
    with pytest.raises(LuthierError, match="merge it"):
        recipe_of("model.adapter=somewhere", kind=KIND, rows=ROWS)
