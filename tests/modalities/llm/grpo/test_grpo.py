"""Training on a model's own completions: the ratio at the start, accumulation, ranks, resuming, missing rewards."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common.checkpoint import directory
from luthier.common.training.run import train

ROWS = [{"prompt": f"What of {'two ' * (at % 4)}{word}?"} for at, word in enumerate(("weather", "Rome", "sunny") * 6)]
REWARDS = """
def letters(answers):
    return [answer.completion.lower().count("e") / (1 + answer.tokens) for answer in answers]

def holes(answers):
    return [None if "a" in answer.completion else float(len(answer.completion)) for answer in answers]
"""
COMMON = (
    "data.max_length=60", "rollout.max_new_tokens=7", "rollout.num_generations=4", "data.batch.examples=2",
    "train.epochs=null", "train.steps=4",
)  # fmt: skip


@pytest.fixture
def recipe_with(recipe_of, tmp_path: Path):
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(*overrides: str, reward: str = "letters", **options: Any) -> Any:
        rewards = f"rewards=[{{kind: function, function: '{tmp_path}/rewards.py:{reward}'}}]"
        return recipe_of(*COMMON, rewards, *overrides, rows=ROWS, kind="llm.grpo", **options)

    return make


def test_fault_4_nothing_depends_on_accumulation_or_on_the_batch_of_the_engine(recipe_with, left) -> None:
    """Completions, losses and weights; in every way of weighing tokens."""
    for loss in ("grpo", "dapo", "dr_grpo"):
        common = (f"task.loss={loss}", "optim.name=sgd", "optim.learning_rate=0.5", "optim.momentum=0")
        one = train(recipe_with(*common, "data.batch.examples=4", output=f"{loss}1")).folder
        four = train(
            recipe_with(*common, "data.batch.examples=1", "train.accumulate=4", "rollout.batch=3", output=f"{loss}4")
        ).folder
        assert left.values(four, "train/reward") == pytest.approx(left.values(one, "train/reward"), rel=1e-6)
        assert left.values(four, "train/entropy") == pytest.approx(left.values(one, "train/entropy"), rel=1e-4)
        expected, found = left.weights(one), left.weights(four)
        assert any(not torch.equal(value, left.weights(one)[key] * 0) for key, value in expected.items())
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def test_fault_22_on_policy_every_ratio_is_exactly_1(recipe_with, monkeypatch) -> None:
    from luthier.modalities.llm.losses import sampled

    seen: list[torch.Tensor] = []
    term = sampled.Sampled.log_ratio.fget
    monkeypatch.setattr(sampled.Sampled, "log_ratio", property(lambda self: seen.append(term(self)) or seen[-1]))
    train(recipe_with("rollout.temperature=0.7", "train.accumulate=2", model="llama-dropout"))
    assert seen
    assert all(bool((one == 0).all()) for one in seen)


def test_the_gradient_is_that_of_each_completion_alone(recipe_with, task_of, tmp_path: Path) -> None:
    """Completions of different lengths and advantages, by transformers' eager attention on whole sequences."""
    rewards = f"rewards=[{{kind: function, function: '{tmp_path}/rewards.py:letters'}}]"
    built = task_of(*COMMON, rewards, "rollout.temperature=0.7", rows=ROWS, kind="llm.grpo")
    task = built.task
    actor = task._drawer.actor
    actor.sampling = replace(actor.sampling, stops=tuple(range(0, 400, 5)), max_new_tokens=12)
    prompts = built.batch([0, 1, 5]).data
    made = task.completed(prompts)
    samples = made["samples"]
    assert len(set(samples.lengths.tolist())) > 3
    torch.manual_seed(0)
    each = torch.randn(len(samples.lengths))
    each[2] = 0.0
    samples.advantages = each.repeat_interleave(samples.lengths)
    samples.used = each != 0
    found = task.loss(task._joined(samples))
    assert found.count == 12
    found.sum.backward()
    gradients = {name: one.grad.clone() for name, one in task.model.named_parameters()}
    task.zero_grad()
    task.model.set_attn_implementation("eager")
    total = torch.zeros(())
    for at, (tokens, advantage) in enumerate(zip(samples.tokens.split(samples.lengths.tolist()), each, strict=True)):
        prompt = torch.from_numpy(prompts["prompts"][at // 4].ids.astype("int64"))
        ids = torch.cat([prompt, tokens.long()])
        logits = task.causal(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.7
        own = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        total = total - advantage * (own - own.detach()).exp().mean()
    total.backward()
    for name, one in task.model.named_parameters():
        torch.testing.assert_close(gradients[name], one.grad, rtol=1e-3, atol=1e-5)


RUNS: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": (("train.accumulate=2",), "llama-dropout"),
    "inside a rollout": (
        ("rollout.steps=2", "rollout.iterations=2", "train.accumulate=2", "train.steps=7", "model.lora.rank=2",
         "model.lora.dropout=0.3", "task.kl.weight=0.1", "task.entropy_weight=0.01"),
        "llama-dropout",
    ),
    "kl in the reward": (("task.loss=reinforce_pp", "task.kl={weight: 0.1, estimator: k1}"), "llama"),
    "drawn anew": (("task.zero_variance=resample", "task.mask_truncated=true"), "qwen3"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_resumed_runs_are_bit_for_bit_the_same(name: str, recipe_with, left, tmp_path: Path) -> None:
    overrides, model = RUNS[name]
    overrides = (*overrides, "checkpoint.every=1")
    whole = train(recipe_with(*overrides, model=model)).folder
    steps = left.steps(whole)
    assert len(steps) >= 4
    for stop in steps[:-1]:
        folder = tmp_path / f"again-{stop}"
        shutil.copytree(whole, folder, symlinks=True)
        shutil.rmtree(folder / "rollouts")
        for checkpoint in directory.committed(folder / "checkpoints"):
            if directory.step_of(checkpoint) > stop:
                shutil.rmtree(checkpoint)
        train(recipe_with(*overrides, model=model).model_copy(update={"output": str(folder)}))
        for curve in ("train/loss", "train/reward", "train/entropy", "train/clip_high"):
            assert left.curve(folder, curve) == left.curve(whole, curve)
        expected, found = left.weights(whole), left.weights(folder)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        for file in (folder / "rollouts").glob("*.parquet"):
            assert records(file) == records(whole / "rollouts" / file.name)


def records(file: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return [{key: str(value) for key, value in row.items()} for row in parquet.read_table(file).to_pylist()]


def test_two_processes_train_as_one(recipe_with, launch, left, tmp_path: Path) -> None:
    common = (
        "task.loss=reinforce_pp_baseline", "optim.name=sgd", "optim.learning_rate=0.5", "optim.momentum=0",
        "rollout.steps=2", "rollout.iterations=2",
    )  # fmt: skip
    one = recipe_with(*common, "train.accumulate=2", output="one")
    two = recipe_with(*common, "train.devices=2", "train.strategy=ddp", output="two")
    train(one)
    launch(tmp_path, [two])
    first, second = tmp_path / "one", tmp_path / "two"
    assert left.values(second, "train/reward") == pytest.approx(left.values(first, "train/reward"), rel=1e-6)
    for key, value in left.weights(first).items():
        torch.testing.assert_close(left.weights(second)[key], value, rtol=1e-4, atol=1e-5)
    for file in (first / "rollouts").glob("*.parquet"):
        kept = ("prompt", "completion", "tokens", "finished", "reward")
        mine, theirs = (
            [[row[key] for key in kept] for row in records(folder / "rollouts" / file.name)]
            for folder in (first, second)
        )
        assert mine == theirs


def test_fault_22_a_missing_reward_takes_out_its_completion_alone(recipe_with, left) -> None:
    folder = train(recipe_with("train.steps=2", reward="holes")).folder
    found = [row for file in sorted((folder / "rollouts").glob("*.parquet")) for row in records(file)]
    missing = [row for row in found if "a" in row["completion"]]
    assert 0 < len(missing) < len(found)
    assert all(row["reward"] == "nan" and float(row["advantage"]) == 0 for row in missing)
    assert all(row["trained"] == "False" and row["error"] != "None" for row in missing)
    assert any(float(row["advantage"]) for row in found)
    assert all(value == value for value in left.values(folder))
