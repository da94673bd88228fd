"""On-policy distillation: what takes the place of the data's answers, the loss on it, the share, exact repetition."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.checkpoint import directory
from luthier.common.seeding import seed_batch
from luthier.common.training.run import train
from luthier.modalities.llm.distill.sampling import answer_begin
from luthier.modalities.llm.tokens import Document

KIND = "llm.distill"


@pytest.fixture
def made(task_of, model_of):
    def make(*overrides: str, **options: Any) -> Any:
        return task_of(
            f"model.teacher={model_of('qwen3')}", "task.on_policy=1", "task.max_new_tokens=6", *overrides, kind=KIND,
            **options,
        )  # fmt: skip

    return make


def gkd(student: Any, teacher: Any, beta: float) -> Any:
    """[N] TRL's GKDTrainer.generalized_jsd_loss, summed over the vocabulary, in numpy (0 < beta < 1)."""

    def log_softmax(logits: Any) -> Any:
        shifted = logits - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    s, t = log_softmax(student), log_softmax(teacher)
    mixture = np.logaddexp(s + np.log1p(-beta), t + np.log(beta))
    kl_teacher, kl_student = np.exp(t) * (t - mixture), np.exp(s) * (s - mixture)
    return (beta * kl_teacher + (1 - beta) * kl_student).sum(axis=1)


def test_where_the_last_answer_begins() -> None:
    marks = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    assert answer_begin(Document(np.arange(10, dtype=np.int32), marks)) == 6
    assert answer_begin(Document(np.arange(4, dtype=np.int32), np.array([0, 1, 1, 1], dtype=bool))) == 1
    assert answer_begin(Document(np.arange(3, dtype=np.int32), np.ones(3, dtype=bool))) == 0


def test_the_student_s_answers_take_the_place_of_the_data_s(made) -> None:
    """Same prompts, earlier answers as they were; 6 new tokens at most, that carry loss; nothing after them."""
    built = made()
    built.task.train_mode()
    data = built.batch([0, 1, 2]).data
    seed_batch(0, 7)
    new, own = built.task._with_samples(data)
    assert own.all()
    for before, after in zip(data["documents"], new["documents"], strict=True):
        begin = answer_begin(before)
        assert after.ids[:begin].tolist() == before.ids[:begin].tolist()
        assert after.trained[:begin].tolist() == before.trained[:begin].tolist()
        assert after.trained[begin:].all()
        assert 1 <= len(after) - begin <= 7
    assert any(
        one.ids.tolist() != other.ids.tolist() for one, other in zip(data["documents"], new["documents"], strict=True)
    )
    assert built.task.model.training, "it was sampled in evaluation mode, which is over"


def test_the_loss_is_gkd_s_on_the_sampled_answers(made, model_of) -> None:
    """TRL's formula on transformers' own logits of each sampled document alone; the data's answers have no part."""
    built = made("task.divergence=generalised", "task.mixture=0.3", "task.sft_weight=0.5")
    built.task.train_mode()
    data = built.batch([0, 1, 2]).data
    seed_batch(0, 7)
    new, _ = built.task._with_samples(data)
    seed_batch(0, 7)
    loss = built.task.loss(data)
    assert loss.count == sum(int(one.trained[1:].sum()) for one in new["documents"]) == loss.logs["on_policy"]
    total = 0.0
    models = [
        hf.AutoModelForCausalLM.from_pretrained(model_of(name), dtype=torch.float32) for name in ("llama", "qwen3")
    ]
    for one in new["documents"]:
        ids = torch.from_numpy(one.ids).long()[None]
        with torch.no_grad():
            logits = [model(input_ids=ids, use_cache=False).logits[0, :-1].double().numpy() for model in models]
        total += gkd(*(part[one.trained[1:]] for part in logits), 0.3).sum()
    assert float(loss.sum.detach()) == pytest.approx(total, rel=1e-4)
    loss.sum.backward()
    assert all(parameter.grad is not None for parameter in built.task.model.parameters())


def test_the_samples_are_the_student_s_own(made) -> None:
    """Drawn from its distribution at the temperature asked for: near 0 it is the most probable token."""
    built = made("task.sampling_temperature=0.001", "task.max_new_tokens=1")
    built.task.train_mode()
    data = built.batch([0, 3]).data
    new, _ = built.task._with_samples(data)
    for before, after in zip(data["documents"], new["documents"], strict=True):
        begin = answer_begin(before)
        with torch.no_grad():
            ids = torch.from_numpy(before.ids[:begin]).long()[None]
            best = int(built.task.causal.eval()(input_ids=ids, use_cache=False).logits[0, -1].argmax())
        assert int(after.ids[begin]) == best


def test_each_example_has_its_chance(made) -> None:
    """Binomial: of 300 examples with the share 0.3 within 4 standard deviations, and both kinds in one batch; the loss
    of the data's tokens counts where the data's answer stayed only."""
    built = made("task.on_policy=0.3", "task.sft_weight=2", "task.max_new_tokens=1")
    built.task.train_mode()
    data = built.batch(range(12)).data
    taken = 0
    for number in range(25):
        seed_batch(0, number)
        new, own = built.task._with_samples(data)
        begins = new["bounds"][:-1].long()
        taken += int(own[begins].sum())
    assert abs(taken - 90) < 4 * (300 * 0.3 * 0.7) ** 0.5
    seed_batch(0, 1)
    new, own = built.task._with_samples(data)
    assert 0 < int(own[new["bounds"][:-1].long()].sum()) < 12
    seed_batch(0, 1)
    loss = built.task.loss(data)
    asked = new["targets"] != -100
    hidden = built.task._run(new).last_hidden_state[0]
    said = built.task._head.loss(hidden[asked & ~own], new["targets"][asked & ~own])
    assert float(loss.sum.detach()) == pytest.approx(loss.logs["divergence"] + 2 * float(said.detach()), rel=1e-5)
    assert loss.logs["on_policy"] == int((asked & own).sum())


def test_an_evaluation_is_on_the_data(made) -> None:
    built = made()
    built.task.eval()
    data = built.batch([0, 1]).data
    assert "on_policy" not in built.task.loss(data).logs
    records = built.task.predict(built.batch([0, 1])).records
    assert [one.told.count for one in records] == [int(doc.trained[1:].sum()) for doc in data["documents"]]


def test_answers_end_at_the_longest_length_and_rows_without_prompt_are_counted(made) -> None:
    built = made("data.max_length=80", "task.max_new_tokens=200", rows=4)
    built.task.train_mode()
    new, _ = built.task._with_samples(built.batch(range(4)).data)
    assert max(map(len, new["documents"])) <= 80
    rows = [{"text": "Rome is warm."}, *({"prompt": "a", "completion": f"{at}"} for at in range(3))]
    assert made("data.max_bad=0.5", rows=rows, output="texts").report.dropped == {"no_prompt": 1}


def test_a_resumed_run_samples_the_same(recipe_of, model_of, left, tmp_path) -> None:
    """Bit for bit, with dropout, an adapter and activation checkpointing, from the middle on."""
    overrides = (
        f"model.teacher={model_of('qwen3')}", "task.on_policy=0.6", "task.max_new_tokens=5", "model.lora.rank=2",
        "model.lora.dropout=0.3", "train.gradient_checkpointing=true", "train.accumulate=2", "checkpoint.every=1",
        "data.batch.examples=2", "train.epochs=2",
    )  # fmt: skip
    options: Any = {"kind": KIND, "model": "llama-dropout"}
    whole = train(recipe_of(*overrides, **options)).folder
    steps = left.steps(whole)
    assert len(steps) == 6
    shares = left.values(whole, "train/on_policy")
    assert 0 < sum(shares) < len(shares)
    folder = tmp_path / "stopped"
    shutil.copytree(whole, folder, symlinks=True)
    for checkpoint in directory.committed(folder / "checkpoints"):
        if directory.step_of(checkpoint) > steps[2]:
            shutil.rmtree(checkpoint)
    train(recipe_of(*overrides, **options).model_copy(update={"output": str(folder)}))
    assert left.curve(folder) == left.curve(whole)
    assert left.curve(folder, "train/on_policy") == left.curve(whole, "train/on_policy")
    expected, found = left.weights(whole), left.weights(folder)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
