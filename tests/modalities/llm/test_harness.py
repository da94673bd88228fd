"""Tasks of lm-evaluation-harness on the model in memory: their metrics, their names before training, their errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from luthier.common.errors import DataError, LuthierError, RecipeError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.after_step import deciding_metric
from luthier.common.training.run import train
from luthier.modalities.llm import harness
from luthier.modalities.llm.sft.task import Task

QUESTIONS = [
    {"question": "The sum of two and three is", "choices": ["five", "warm", "the weather in Rome"], "answer": 0},
    {"question": "It is sunny and", "choices": ["five", "warm"], "answer": 1},
    {"question": "You are", "choices": ["two", "helpful", "a city"], "answer": 2},
    {"question": "What is the", "choices": ["weather", "sum and the sum"], "answer": 1},
    {"question": "Think before", "choices": ["you answer", "three"], "answer": 0},
]


@pytest.fixture
def made(tmp_path: Path) -> SimpleNamespace:
    """Two tasks of one's own in files: choices, and answers that are generated."""
    pytest.importorskip("lm_eval")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choices = {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    answers = {
        "task": "answers",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "filter_list": [{"name": "last", "filter": [{"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    files = {}
    for task in (choices, answers):
        files[task["task"]] = str(tmp_path / f"{task['task']}.yaml")
        Path(files[str(task["task"])]).write_text(yaml.safe_dump({**common, **task}))
    return SimpleNamespace(**files)


def told(model: Any, tokenizer: Any, question: dict[str, Any]) -> list[float]:
    """Log-probability of each choice after the question, by the model alone."""
    before = len(tokenizer(question["question"]).input_ids)
    found = []
    for choice in question["choices"]:
        ids = torch.tensor([tokenizer(f"{question['question']} {choice}").input_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, before - 1 : -1].float()
        found.append(float(logits.log_softmax(-1).gather(1, ids[0, before:, None]).sum()))
    return found


def test_choices_are_judged_by_the_probabilities_of_the_model(made: Any, task_of: Callable[..., Any]) -> None:
    """acc: the most probable choice; acc_norm: by probability per character. Also with an adapter."""
    for options in ((), ("model.lora.rank=4", "model.lora.target_modules=all-linear")):
        task = task_of(f"evaluate.harness.tasks=[{made.choices}]", *options).task
        for name, weight in task.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.2)
        task.eval()
        before = {name: value.clone() for name, value in task.state_dict().items()}
        found = task.measure()
        expected = [told(task.model, task.processing.tokenizer, one) for one in QUESTIONS]
        right = normed = 0
        for one, values in zip(QUESTIONS, expected, strict=True):
            lengths = [len(choice) for choice in one["choices"]]
            right += max(range(len(values)), key=lambda at: values[at]) == one["answer"]
            normed += max(range(len(values)), key=lambda at: values[at] / lengths[at]) == one["answer"]
        assert found == {"harness/choices/acc": right / 5, "harness/choices/acc_norm": normed / 5}
        assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
        assert "tie_weights" not in vars(task.causal)


def test_a_limit_counts_and_generated_answers_have_their_filter(made: Any, task_of: Callable[..., Any]) -> None:
    made_task = task_of(f"evaluate.harness={{tasks: [{made.choices}, {made.answers}], limit: 2, num_fewshot: 1}}")
    task = made_task.task
    task.eval()
    found = task.measure()
    assert found.keys() == Task.metrics_of(made_task.recipe).keys() - {"loss", "accuracy"}
    assert found.keys() == {
        "harness/choices/acc", "harness/choices/acc_norm", "harness/answers/exact_match,last"
    }  # fmt: skip
    assert found["harness/choices/acc"] in (0, 0.5, 1)
    assert found == task.measure()


def test_a_run_is_decided_by_a_benchmark(
    made: Any, recipe_of: Callable[..., Any], rows_of: Any, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path / "rows.jsonl", 6)
    recipe = recipe_of(
        f"data.validation={rows}", f"data.regression={rows}", "train.epochs=null", "train.steps=2", "evaluate.every=1",
        f"evaluate.harness.tasks=[{made.choices}]", "checkpoint.best=harness/choices/acc", rows=rows,
    )  # fmt: skip
    assert deciding_metric(recipe, Task) == ("harness/choices/acc", "max")
    outcome = train(recipe)
    lines = [json.loads(line) for line in (outcome.folder / "evaluations.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all("harness/choices/acc" in line and "regression/loss" in line for line in lines)
    assert not any("regression/harness" in name for line in lines for name in line)
    again = evaluate_checkpoint(outcome.folder / "checkpoints" / "last")
    assert again.metrics["harness/choices/acc"] == lines[-1]["harness/choices/acc"]


def test_what_is_wrong_is_told_before_training(
    made: Any, recipe_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(f"evaluate.harness.tasks=[{made.choices}]", "checkpoint.best=harness/choices/f1")
    with pytest.raises(RecipeError, match="harness/choices/acc_norm"):
        train(recipe)
    missing = str(tmp_path / "missing.yaml")
    with pytest.raises(RecipeError, match="the harness has no such task") as caught:
        train(recipe_of(f"evaluate.harness.tasks=[{missing}]"))
    assert missing in str(caught.value)
    broken = tmp_path / "broken.yaml"
    broken.write_text(Path(made.choices).read_text().replace("questions.jsonl", "gone.jsonl"))
    with pytest.raises(DataError, match="the tasks can't be loaded"):
        train(recipe_of(f"evaluate.harness.tasks=[{broken}]"))
    assert not (tmp_path / "run").exists()


def test_without_the_harness_its_extra_is_named(recipe_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    harness._load.cache_clear()
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LuthierError, match=r"luthier\[harness\]"):
        train(recipe_of("evaluate.harness.tasks=[hellaswag]"))
