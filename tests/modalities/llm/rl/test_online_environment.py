"""Training on episodes in an environment: what the policy said carries loss, what it read does not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common.checkpoint import directory
from luthier.common.errors import RecipeError
from luthier.common.training.run import train

ROWS = [{"question": f"What of {word}?"} for word in ("weather", "Rome", "sunny", "warm", "city", "name")]
ECHO = """
class Echo:
    tools = ()

    def __init__(self, turns=2):
        self.left = turns

    def reset(self, row):
        if row["question"] == "What of city?":
            raise KeyError("no such city")
        return [{"role": "user", "content": row["question"]}]

    def step(self, message):
        self.left -= 1
        reward = 0.25
        return [{"role": "user", "content": f"You said {len(message['content'])} letters."}], reward, self.left == 0


def letters(answers):
    return [answer.completion.lower().count("e") for answer in answers]
"""
COMMON = (
    "data.max_length=120", "rollout.max_new_tokens=6", "rollout.num_generations=4", "data.batch.examples=2",
    "train.epochs=null", "train.steps=3",
)  # fmt: skip


@pytest.fixture
def overrides(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "echo.py").write_text(ECHO)
    place = f"{{entry_point: '{tmp_path}/echo.py:Echo', turns: 2}}"
    own = f"{{kind: function, function: '{tmp_path}/echo.py:letters'}}"
    return (*COMMON, f"rollout.environment={place}", f"rewards=[{{kind: environment}}, {own}]")


def ending(task: Any) -> None:
    """Let a fifth of all tokens end a turn, so that an untrained model ends some."""
    actor = task._drawer.actor
    actor.sampling = replace(actor.sampling, stops=tuple(range(0, 400, 3)))


def test_what_was_read_carries_no_loss(overrides, task_of) -> None:
    """The gradient is that of the policy's tokens alone, by transformers' eager attention on each whole episode."""
    built = task_of(*overrides, "rollout.temperature=0.7", rows=ROWS, kind="llm.grpo")
    task = built.task
    ending(task)
    prompts = built.batch([0, 1, 2]).data
    samples = task.completed(prompts)["samples"]
    assert not bool(samples.trained.all())
    assert bool(samples.trained.any())
    torch.manual_seed(0)
    each = torch.randn(len(samples.lengths))
    samples.advantages = each.repeat_interleave(samples.lengths)
    found = task.loss(task._joined(samples))
    found.sum.backward()
    gradients = {name: one.grad.clone() for name, one in task.model.named_parameters()}
    task.zero_grad()
    task.model.set_attn_implementation("eager")
    lengths, total = samples.lengths.tolist(), torch.zeros(())
    prompt_of = [
        prompt
        for prompt, number in zip(samples.prompts.split(samples.prompt_lengths.tolist()), samples.groups, strict=True)
        for _ in range(int(number))
    ]
    parts = zip(samples.tokens.split(lengths), samples.trained.split(lengths), prompt_of, each, strict=True)
    for tokens, trained, prompt, advantage in parts:
        ids = torch.cat([prompt, tokens]).long()
        logits = task.causal(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.7
        own = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0][trained]
        total = total - advantage * (own - own.detach()).exp().mean()
    total.backward()
    for name, one in task.model.named_parameters():
        torch.testing.assert_close(gradients[name], one.grad, rtol=1e-3, atol=1e-5)


def test_a_training_in_an_environment_goes_on_bit_for_bit(overrides, recipe_of, left, tmp_path: Path) -> None:
    """Saved inside a rollout, prompts of the environment's making and all; failed episodes are told and left out."""
    more = (*overrides, "rollout.steps=3", "checkpoint.every=1", "rollout.max_new_tokens=12")
    whole = train(recipe_of(*more, rows=ROWS, kind="llm.grpo", model="qwen3")).folder
    folder = tmp_path / "again"
    shutil.copytree(whole, folder, symlinks=True)
    for checkpoint in directory.committed(folder / "checkpoints"):
        if directory.step_of(checkpoint) > 1:
            shutil.rmtree(checkpoint)
    recipe = recipe_of(*more, rows=ROWS, kind="llm.grpo", model="qwen3")
    train(recipe.model_copy(update={"output": str(folder)}))
    assert left.curve(folder) == left.curve(whole)
    expected, found = left.weights(whole), left.weights(folder)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    from pyarrow import parquet

    rows = [row for file in (whole / "rollouts").glob("*.parquet") for row in parquet.read_table(file).to_pylist()]
    failed = [row for row in rows if row["error"]]
    assert 0 < len(failed) < len(rows)
    assert any(row["advantage"] for row in rows)
    assert all(
        "no such city" in row["error"] and not row["trained"] and row["reward"] != row["reward"] for row in failed
    )
    assert all("What of" in row["prompt"] for row in rows if not row["error"])


def test_the_reward_of_an_environment_needs_one(recipe_of) -> None:
    with pytest.raises(RecipeError, match=r"needs rollout\.environment"):
        recipe_of(*COMMON, "rewards=[{kind: environment}]", rows=ROWS, kind="llm.grpo")
