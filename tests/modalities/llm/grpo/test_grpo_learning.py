"""A toy is learned: rewards rise when a model is trained on what it says itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from luthier.common.training.run import train

ROWS = [{"prompt": f"What of {word}?", "answer": word} for word in ("weather", "Rome", "sunny", "warm")] * 4
SUN = """
def sun(answers):
    return [answer.completion.lower().count("s") / max(1, len(answer.completion)) for answer in answers]
"""
COMMON = (
    "data.max_length=60", "rollout.max_new_tokens=8", "rollout.num_generations=8", "data.batch.examples=8",
    "train.epochs=null", "optim.learning_rate=3e-3",
)  # fmt: skip


@pytest.mark.parametrize("loss", ["grpo"])
def test_the_reward_rises(loss: str, recipe_of, left, tmp_path: Path) -> None:
    (tmp_path / "sun.py").write_text(SUN)
    recipe = recipe_of(
        *COMMON, f"task.loss={loss}", f"rewards=[{{kind: function, function: '{tmp_path}/sun.py:sun'}}]",
        "train.steps=25", rows=ROWS, kind="llm.grpo",
    )  # fmt: skip
    folder = train(recipe).folder
    rewards = left.values(folder, "train/reward")
    assert len(rewards) == 25
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
