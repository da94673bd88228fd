"""PPO: estimates and losses against formulas that are written down as TRL's PPOTrainer had them, over padded arrays;
the gradient of a whole task; the head saved and resumed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from luthier.common import kinds
from luthier.common.checkpoint import directory
from luthier.common.training.run import train
from luthier.modalities.llm.losses import sampled
from luthier.modalities.llm.losses.value import value_loss
from luthier.modalities.llm.rl.advantages import gae

COUNTS = np.array([3, 1, 5, 2])
R = int(COUNTS.sum())
ROWS = [{"prompt": f"What of {'two ' * (at % 4)}{word}?"} for at, word in enumerate(("weather", "Rome", "sunny") * 6)]
LETTERS = """
def letters(answers):
    return [answer.completion.lower().count("e") / (1 + answer.tokens) for answer in answers]
"""
COMMON = (
    "data.max_length=60", "rollout.max_new_tokens=7", "rollout.num_generations=2", "data.batch.examples=3",
    "train.epochs=null", "train.steps=4",
)  # fmt: skip


def padded(flat: np.ndarray) -> np.ndarray:
    found = np.zeros((len(COUNTS), COUNTS.max()))
    for row, part in enumerate(np.split(flat, np.cumsum(COUNTS)[:-1])):
        found[row, : len(part)] = part
    return found


@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_advantage_estimates(gamma: float, decay: float) -> None:
    """As TRL: rewards and values are 0 in the padding, and t runs from the last column to the first."""
    random = np.random.default_rng(0)
    rewards, values = random.normal(0, 1, R), random.normal(0, 1, R)
    r, v = padded(rewards), padded(values)
    last, reverse = np.zeros(len(COUNTS)), []
    for t in reversed(range(v.shape[1])):
        after = v[:, t + 1] if t + 1 < v.shape[1] else 0.0
        last = r[:, t] + gamma * after - v[:, t] + gamma * decay * last
        reverse.append(last)
    expected = np.stack(reverse[::-1], axis=1)
    found = padded(gae(rewards, values, COUNTS, gamma, decay))
    inside = np.arange(v.shape[1]) < COUNTS[:, None]
    np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-12)
    if decay == 1.0:  # what is still to come, less what was expected
        togo = [np.array([sum(gamma**k * x for k, x in enumerate(one[t:])) for t in range(len(one))]) for one in
                np.split(rewards, np.cumsum(COUNTS)[:-1])]  # fmt: skip
        np.testing.assert_allclose(gae(rewards, values, COUNTS, gamma, 1.0), np.concatenate(togo) - values, rtol=1e-9)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_critic_s_loss_and_its_gradient(clip: float | None) -> None:
    """0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2), and central differences of it."""
    random = np.random.default_rng(1)
    values, old, returns = (random.normal(0, 0.5, R) for _ in range(3))

    def expected(v: np.ndarray) -> np.ndarray:
        error = (v - returns) ** 2
        near = v if clip is None else np.clip(v, old - clip, old + clip)
        return 0.5 * np.maximum(error, (near - returns) ** 2)

    leaf = torch.tensor(values, requires_grad=True)
    found = value_loss(leaf, torch.tensor(old), torch.tensor(returns), clip)
    np.testing.assert_allclose(found.detach().numpy(), expected(values), rtol=1e-12)
    found.sum().backward()
    slope = (expected(values + 1e-6) - expected(values - 1e-6)) / 2e-6
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), slope, rtol=1e-5, atol=1e-8)
    assert (np.abs(slope) < 1e-9).any() == (clip is not None), "some are clipped"


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "letters.py").write_text(LETTERS)
    return f"rewards=[{{kind: function, function: '{tmp_path}/letters.py:letters'}}]"


def test_the_gradient_of_policy_and_critic(rewards: str, task_of) -> None:
    """On whole sequences, by transformers' eager attention and autograd; with values that are clipped and ratios that
    are not 1."""
    built = task_of(*COMMON, rewards, "rollout.temperature=0.7", "task.kl.weight=0", "task.value_weight=0.5",
                    rows=ROWS, kind="llm.ppo")  # fmt: skip
    task = built.task
    actor = task._drawer.actor
    actor.sampling = replace(actor.sampling, stops=tuple(range(0, 400, 5)), max_new_tokens=12)
    prompts = built.batch([0, 1, 5]).data
    samples = task.completed(prompts)["samples"]
    torch.manual_seed(0)
    torch.nn.init.normal_(task.value.weight)
    number = len(samples.tokens)
    samples.advantages, samples.values, samples.returns = torch.randn(3, number).unbind()
    samples.old = samples.engine + 0.3 * torch.randn(number)
    found = task.loss(task._joined(samples))
    assert found.count == number
    found.sum.backward()
    names = dict(task.named_parameters())
    gradients = {name: one.grad.clone() for name, one in names.items()}
    task.zero_grad()
    task.model.set_attn_implementation("eager")
    total, lengths = torch.zeros(()), samples.lengths.tolist()
    columns = (getattr(samples, name).split(lengths) for name in ("tokens", "advantages", "values", "returns", "old"))
    for at, (tokens, advantages, before, returns, old) in enumerate(zip(*columns, strict=True)):
        prompt = torch.from_numpy(prompts["prompts"][at // 2].ids.astype("int64"))
        ids, begin = torch.cat([prompt, tokens.long()]), len(prompt) - 1
        out = task.causal(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        logits, hidden = out.logits[0, begin:-1] / 0.7, out.hidden_states[-1][0, begin:-1]
        ratio = (logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0] - old).exp()
        values = (hidden @ task.value.weight.T)[:, 0] + task.value.bias
        policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        near = before + (values - before).clamp(-0.2, 0.2)
        total = total + (policy + 0.5 * 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)).sum()
    torch.testing.assert_close(found.sum, total, rtol=1e-4, atol=1e-4)
    total.backward()
    for name, one in names.items():
        torch.testing.assert_close(gradients[name], one.grad, rtol=1e-3, atol=1e-4)


def test_fault_4_nothing_depends_on_accumulation(rewards: str, recipe_of, left) -> None:
    common = (*COMMON, rewards, "optim.name=sgd", "optim.learning_rate=0.1", "optim.momentum=0", "train.steps=2")
    one = train(recipe_of(*common, "data.batch.examples=4", rows=ROWS, kind="llm.ppo", output="one")).folder
    more = ("data.batch.examples=1", "train.accumulate=4")
    four = train(recipe_of(*common, *more, rows=ROWS, kind="llm.ppo", output="four")).folder
    for name in ("train/loss", "train/reward", "train/value_loss"):
        assert left.values(four, name) == pytest.approx(left.values(one, name), rel=1e-4, abs=1e-6)
    expected, found = left.weights(one), left.weights(four)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def test_a_run_with_its_critic_goes_on_bit_for_bit(rewards: str, recipe_of, left, tmp_path: Path, monkeypatch) -> None:
    """Two minibatches, each twice, and a penalty; the head is saved with the model and read from there. On-policy every
    ratio is exactly 1."""
    seen: list[torch.Tensor] = []
    term = sampled.Sampled.log_ratio.fget
    monkeypatch.setattr(sampled.Sampled, "log_ratio", property(lambda self: seen.append(term(self)) or seen[-1]))
    overrides = (
        *COMMON, rewards, "rollout.steps=2", "rollout.iterations=2", "task.value_weight=1", "checkpoint.every=1",
        "model.lora.rank=2", "model.lora.dropout=0.3", "train.steps=5",
    )  # fmt: skip
    recipe = recipe_of(*overrides, rows=ROWS, kind="llm.ppo")
    whole = train(recipe).folder
    assert bool((seen[0] == 0).all())
    assert any(bool((one != 0).any()) for one in seen)
    for stop in (1, 3):
        folder = tmp_path / f"again-{stop}"
        shutil.copytree(whole, folder, symlinks=True)
        for checkpoint in directory.committed(folder / "checkpoints"):
            if directory.step_of(checkpoint) > stop:
                shutil.rmtree(checkpoint)
        train(recipe.model_copy(update={"output": str(folder)}))
        assert left.curve(folder) == left.curve(whole)
        expected, found = (left.weights(one) for one in (whole, folder))
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    heads = [
        head(one / "checkpoints" / "last" / "model") for one in (whole, tmp_path / "again-1", tmp_path / "again-3")
    ]
    assert all(torch.equal(one[key], heads[0][key]) for one in heads for key in ("weight", "bias"))
    assert bool(heads[0]["weight"].any())
    losses = left.values(whole, "train/value_loss")
    assert len(losses) == 5
    again = kinds.task("llm.ppo")(recipe, whole / "checkpoints" / "last" / "model")
    assert torch.equal(again.value.weight, heads[0]["weight"])


def head(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "value_head" / "model.safetensors")
