"""A training whose completions are drawn by a server process: with the weights of each step, and as the trainer itself
would judge them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from luthier.common.training.run import train

ROWS = [{"prompt": f"What of {word}?"} for word in ("weather", "Rome", "sunny", "warm", "city", "name")]
LETTERS = """
def letters(answers):
    return [answer.completion.lower().count("e") / (1 + answer.tokens) for answer in answers]
"""
COMMON = (
    "data.max_length=60", "rollout.max_new_tokens=5", "rollout.num_generations=3", "data.batch.examples=2",
    "train.epochs=null", "train.steps=3", "rollout.temperature=0.8",
)  # fmt: skip


@pytest.fixture
def recipe_with(recipe_of, tmp_path: Path):
    (tmp_path / "letters.py").write_text(LETTERS)
    rewards = f"rewards=[{{kind: function, function: '{tmp_path}/letters.py:letters'}}]"

    def make(*overrides: str, **options: Any) -> Any:
        return recipe_of(*COMMON, rewards, *overrides, rows=ROWS, kind="llm.grpo", **options)

    return make


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_a_server_draws_with_the_weights_of_each_step(protocol: str, recipe_with, model_of, serve, left) -> None:
    """Its log-probabilities are the trainer's own at every step, by a KL of nothing; stale ones would be far off."""
    options = ("--logprobs-mode", "processed_logprobs") if protocol == "vllm" else ()
    place = serve(protocol, str(model_of("llama")), *options)
    engine = f"rollout.engine={{server: {protocol}, urls: ['{place.url}'], patience: 20, workers: 4}}"
    whole = (
        ("optim.name=sgd", "optim.learning_rate=0.5", "optim.momentum=0")
        if protocol == "vllm"
        else ("model.lora.rank=4",)
    )
    folder = train(recipe_with(engine, *whole, "rollout.correction=token")).folder
    place.kill()
    apart = left.values(folder, "train/engine_kl")
    assert len(apart) == 3
    assert max(apart) < 1e-6
    norms = left.values(folder, "train/gradient_norm")
    assert all(norms), "the weights move, so that those of the step before would give other values"
    assert len(list((folder / "rollouts").glob("*.parquet"))) == 3
    assert len(list((folder / "weights").iterdir())) == 1, "older weights go"


def test_a_server_that_is_away_ends_the_run(recipe_with) -> None:
    from luthier.modalities.llm.rl.web import ServerError

    with pytest.raises(ServerError, match="not reached"):
        train(recipe_with("rollout.engine={urls: ['http://127.0.0.1:1'], patience: 0.5}"))
