"""Distillation: divergences by definition, vocabularies padded differently, another tokenizer, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.errors import LuthierError, ModelError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.modalities.llm.losses.divergence import divergence

KIND = "llm.distill"


def expected(student: Any, teacher: Any, mixture: float, temperature: float) -> Any:
    """[N] by the definition, with probabilities in float64."""

    def softmax(logits: Any) -> Any:
        shifted = np.exp((logits - logits.max(axis=1, keepdims=True)) / temperature)
        return shifted / shifted.sum(axis=1, keepdims=True)

    def kl(first: Any, second: Any) -> Any:
        return (first * np.log(first / second)).sum(axis=1)

    q, p = softmax(student), softmax(teacher)
    if mixture in (0, 1):
        return kl(p, q) if mixture == 0 else kl(q, p)
    m = mixture * p + (1 - mixture) * q
    return mixture * kl(p, m) + (1 - mixture) * kl(q, m)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("mixture", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergences_forward_and_gradient(mixture: float, temperature: float) -> None:
    """As TRL 1.16's GKDTrainer.generalized_jsd_loss, whose beta is the mixture; gradients by central differences."""
    random = np.random.default_rng(0)
    student, teacher = random.normal(0, 2, (3, 5)), random.normal(0, 2, (3, 5))
    given = torch.tensor(student, requires_grad=True)
    found = divergence(given, torch.tensor(teacher), mixture, temperature)
    np.testing.assert_allclose(found.detach().numpy(), expected(student, teacher, mixture, temperature), rtol=1e-5)
    found.sum().backward()
    for place in np.ndindex(student.shape):
        step = np.zeros_like(student)
        step[place] = 1e-6
        up, down = (expected(student + sign * step, teacher, mixture, temperature).sum() for sign in (1, -1))
        assert float(given.grad[place]) == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6)


def test_fault_24_vocabularies_of_different_padded_size() -> None:
    """Only ids that both have count; padding is no part of the distributions."""
    student, teacher = torch.randn(4, 7), torch.randn(4, 12)
    torch.testing.assert_close(divergence(student, teacher), divergence(student, teacher[:, :7]))
    torch.testing.assert_close(divergence(teacher, student), divergence(teacher[:, :7], student))


@pytest.mark.parametrize(("name", "mixture"), [("forward", 0.0), ("reverse", 1.0), ("js", 0.5), ("generalised", 0.2)])
def test_the_loss_from_both_models_logits(name: str, mixture: float, task_of, model_of, monkeypatch) -> None:
    """fault 24 in a training: the teacher's table has 500 rows; in chunks of 64 logits."""
    from luthier.common import losses

    monkeypatch.setitem(losses.CHUNK, "cpu", 1)
    more = ("task.mixture=0.2",) if name == "generalised" else ()
    teacher = model_of("qwen3", "chatml", 500)
    made = task_of(f"model.teacher={teacher}", f"task.divergence={name}", "task.sft_weight=0.5", *more, kind=KIND)
    made.task.train_mode()
    data = made.batch([0, 1, 2, 3, 4]).data
    loss = made.task.loss(data)
    (loss.sum / loss.count).backward()
    asked = data["targets"] != -100
    student, taught = (
        hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        for folder in (model_of(), teacher)
    )
    logits = []
    for model in (student, taught):
        parts = data["input_ids"].split(data["bounds"].diff().tolist())
        logits.append(torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts])[asked])
    known = min(one.shape[1] for one in logits)
    own = logits[0][:, :known]
    wanted = expected(own.detach().double().numpy(), logits[1][:, :known].detach().double().numpy(), mixture, 1.0).sum()
    token = torch.nn.functional.cross_entropy(logits[0], data["targets"][asked], reduction="sum")
    assert loss.logs["divergence"] == pytest.approx(wanted, rel=1e-4)
    assert float(loss.sum.detach()) == pytest.approx(wanted + 0.5 * float(token.detach()), rel=1e-4)
    total = divergence(own, logits[1].detach()[:, :known], mixture).sum() + 0.5 * token
    (total / int(asked.sum())).backward()
    theirs = dict(student.named_parameters())
    largest = max(float(one.grad.abs().max()) for one in theirs.values())
    for key, parameter in made.task.model.named_parameters():
        assert float((parameter.grad - theirs[key].grad).abs().max()) <= 1e-5 * largest, key
    assert all(parameter.grad is None for parameter in made.task.teacher.parameters())


def test_another_tokenizer_is_refused(task_of, model_of) -> None:
    with pytest.raises(ModelError, match="another tokenizer"):
        task_of(f"model.teacher={model_of('llama', 'qwen3')}", kind=KIND)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(task_of, model_of) -> None:
    made = task_of(f"model.teacher={model_of()}", kind=KIND)
    assert float(made.task.loss(made.batch([0, 1]).data).sum.detach()) == pytest.approx(0, abs=1e-4)


def test_the_student_comes_nearer_and_the_teacher_is_not_saved(recipe_of, model_of, left) -> None:
    recipe = recipe_of(f"model.teacher={model_of('qwen3')}", "train.epochs=8", "optim.learning_rate=3e-3", kind=KIND)
    folder = train(recipe).folder
    values = left.values(folder, "train/divergence")
    assert values[-1] < 0.6 * values[0]
    assert not (folder / "teacher").exists()
    state = torch.load(left.checkpoints(folder)[-1] / "state" / "trainer.pt", weights_only=True)
    assert not [key for key in state["state_dict"] if key.startswith("teacher.")]


@pytest.mark.parametrize("overrides", [(), ("task.top_k=5",)], ids=["full", "top_k"])
def test_the_divergence_is_evaluated_by_slice_and_decides(
    overrides: tuple[str, ...], recipe_of, rows_of, model_of, left, tmp_path: Path
) -> None:
    """In training and from the checkpoint alone, for any batch; the mean of tokens, not of batches."""
    file = rows_of(tmp_path / "validation.jsonl", 6)
    common = (
        f"model.teacher={model_of('qwen3')}", f"data.validation={file}", "evaluate.slices=[topic]",
        "evaluate.at_start=true", "train.epochs=2", "optim.learning_rate=3e-3", "evaluate.generate={max_new_tokens: 3}",
    )  # fmt: skip
    folder = train(recipe_of(*common, *overrides, kind=KIND)).folder
    values = left.values(folder, "validation/divergence")
    assert values[-1] < values[0]
    one, many = (
        evaluate_checkpoint(folder / "checkpoints" / "best", overrides=[f"evaluate.batch={size}"]).metrics
        for size in (1, 6)
    )
    assert one["divergence"] == pytest.approx(min(values), rel=1e-4) == pytest.approx(many["divergence"], rel=1e-4)
    parts = one["slices"]["topic"].values()
    assert sum(part["divergence"] * part["tokens"] for part in parts) == pytest.approx(
        one["divergence"] * one["tokens"], rel=1e-6
    )
    assert one["answers"] == 6


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("task.mixture=0.5",), "mixture"),
        (("task.divergence=generalised",), "mixture"),
        (("task.on_policy=0.5", "task.top_k=4"), "top_k"),
        (("task.top_k=4", "data.streaming=true", "train.epochs=null", "train.steps=2"), "streaming"),
        (("task.on_policy=0.5", "train.strategy=fsdp2"), "on_policy"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(overrides: tuple[str, ...], problem: str, recipe_of, model_of) -> None:
    with pytest.raises(LuthierError, match=problem):
        recipe_of(f"model.teacher={model_of()}", *overrides, kind=KIND)
