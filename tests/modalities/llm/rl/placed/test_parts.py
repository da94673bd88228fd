"""What placed engines and rewards are made of, without Ray: in this process."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.errors import LuthierError, ModelError, RecipeError
from luthier.common.losses import TokenLoss
from luthier.modalities.llm.model import Head, load_model
from luthier.modalities.llm.rl import choose
from luthier.modalities.llm.rl.engines.engine import Sampling
from luthier.modalities.llm.rl.engines.local import LocalEngine
from luthier.modalities.llm.rl.engines.servers import OtherWeights
from luthier.modalities.llm.rl.placed.engine import EngineWorker
from luthier.modalities.llm.rl.placed.rewards import joined, shared
from luthier.modalities.llm.rl.placed.weights import fingerprint, packed, unpack
from luthier.modalities.llm.rl.rewards.answer import Answer, Failure
from luthier.modalities.llm.rl.rewards.rewards import Rewards

PROMPTS = [np.array(ids, np.int32) for ids in ([5], [7, 8, 9, 10, 11, 12], [3, 4, 5])]
SEEDS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
SAMPLING = Sampling(8, (17, 30, 41), 1.2)
COMMON = ("rewards=[{kind: exact}]", "data.max_length=60", "rollout.max_new_tokens=8")
ROWS = [{"prompt": "What of two?", "answer": "three"}]


@pytest.fixture
def placed_of(recipe_of):
    def make(*overrides: str, placement: str = "{engines: {number: 2}}") -> Any:
        return recipe_of(*COMMON, f"rollout.placement={placement}", *overrides, rows=ROWS, kind="llm.grpo")

    return make


def trainer_s(recipe: Any, changed: float) -> tuple[Any, LocalEngine]:
    """A model as a training would have it after some steps, and the engine with it."""
    tokenizer = hf.AutoTokenizer.from_pretrained(recipe.model.path)
    torch.manual_seed(3)
    model, causal = load_model(recipe, tokenizer, None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += changed * torch.randn_like(parameter)
    return model, LocalEngine(causal.eval(), Head(causal, TokenLoss()), recipe.rollout.batch)


@pytest.mark.parametrize("overrides", [(), ("model.lora.rank=4",)])
def test_a_worker_draws_what_the_trainer_would(overrides: tuple[str, ...], placed_of) -> None:
    recipe = placed_of(*overrides)
    model, local = trainer_s(recipe, 0.3)
    worker = EngineWorker(recipe, None, torch.get_num_threads(), "cpu")
    assert worker.ready() == fingerprint(model)
    for version, expected in ((4, local.generate(PROMPTS, SAMPLING, SEEDS)), (5, None)):
        if expected is None:
            with torch.no_grad():
                next(one for one in model.parameters() if one.requires_grad).mul_(1.5)
            expected = local.generate(PROMPTS, SAMPLING, SEEDS)
        worker.load(version, packed(model))
        found = worker.generate(version, PROMPTS, SAMPLING, SEEDS)
        for mine, theirs in zip(
            [one for of in found for one in of], [one for of in expected for one in of], strict=True
        ):
            np.testing.assert_array_equal(mine.tokens, theirs.tokens)
            np.testing.assert_array_equal(mine.log_probs, theirs.log_probs)
            assert (mine.finished, mine.version) == (theirs.finished, version)


def test_a_worker_refuses_other_weights_and_other_models(placed_of) -> None:
    recipe = placed_of("model.lora.rank=4")
    model, _ = trainer_s(recipe, 0.3)
    worker = EngineWorker(recipe, None, torch.get_num_threads(), "cpu")
    worker.ready()
    with pytest.raises(OtherWeights):
        worker.generate(0, PROMPTS, SAMPLING, SEEDS)
    worker.load(1, packed(model))
    with pytest.raises(OtherWeights, match="other weights"):
        worker.generate(2, PROMPTS, SAMPLING, SEEDS)
    with pytest.raises(ModelError, match="not the trainer's"):
        worker.load(2, dict(list(packed(model).items())[1:]))
    with pytest.raises(OtherWeights):
        worker.generate(1, PROMPTS, SAMPLING, SEEDS)  # it may have been half of each
    other, _ = trainer_s(recipe, 0.0)
    frozen = next(one for one in other.parameters() if not one.requires_grad)
    before = fingerprint(other)
    with torch.no_grad():
        frozen[0] += 1
    assert fingerprint(other) != before


def test_weights_of_all_kinds_arrive_as_they_are() -> None:
    """16-bit numbers, parameters of a transposed layout, buffers that are saved, and not those that are not."""

    def made() -> torch.nn.Module:
        found = torch.nn.Sequential(torch.nn.Linear(3, 2, dtype=torch.bfloat16), torch.nn.BatchNorm1d(2))
        found[0].weight = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16).T)
        found[0].register_buffer("passing", torch.randn(4), persistent=False)
        found[1].running_mean.normal_()
        return found

    first, second = made(), made()
    unpack(packed(first), second)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    assert not torch.equal(first[0].passing, second[0].passing)


def answers(*groups: int) -> list[Answer]:
    rows = [{"answer": str(number)} for number in range(len(groups))]
    return [Answer("?", str(at), 1, True, row) for row, size in zip(rows, groups, strict=True) for at in range(size)]


@pytest.mark.parametrize(
    ("groups", "number", "sizes"),
    [((4, 4, 4, 4), 2, [8, 8]), ((4, 4, 4), 2, [8, 4]), ((4,), 3, [4]), ((2, 2, 2, 2, 2), 3, [4, 4, 2]), ((), 2, [])],
)
def test_answers_are_shared_out_by_whole_prompts(groups: tuple[int, ...], number: int, sizes: list[int]) -> None:
    every = answers(*groups)
    parts = shared(every, number)
    assert [len(part) for part in parts] == sizes
    assert [one for part in parts for one in part] == every


def test_scores_of_parts_are_those_of_the_whole(recipe_of) -> None:
    two = "rewards=[{kind: exact}, {kind: exact, name: lost, reference: none, weight: 2}]"
    rewards = Rewards(recipe_of(*COMMON, two, rows=ROWS, kind="llm.grpo").rewards)
    every = answers(3, 3, 2)
    parts = shared(every, 2)
    whole = rewards.score(every)
    found = joined([rewards.score(part) for part in parts], [len(part) for part in parts], rewards.names)
    np.testing.assert_array_equal(found.total, whole.total)
    assert {name: values.tolist() for name, values in found.by_name.items() if name == "exact"} == {
        "exact": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    }
    assert sorted(found.errors, key=lambda one: one.answer) == sorted(whole.errors, key=lambda one: one.answer)
    assert found.errors[-1] == Failure(7, "lost", "the row has no field 'none'")
    assert joined([], [], ["exact"]).total.tolist() == []


def test_without_ray_the_error_names_the_extra(placed_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LuthierError, match=r"luthier\[ray\]"):
        choose.engine(placed_of(), None, None, None)  # type: ignore[arg-type]
    with pytest.raises(LuthierError, match=r"luthier\[ray\]"):
        choose.rewards(placed_of(placement="{rewards: {number: 2}}"))


@pytest.mark.parametrize(
    ("overrides", "placement", "told"),
    [
        ((), "{address: auto}", "nothing is placed"),
        (("rollout.engine={urls: ['http://host:1']}",), "{engines: {number: 2}}", "servers draw already"),
        (("train.tensor_parallel=2",), "{engines: {number: 2}}", "tensor_parallel"),
    ],
)
def test_placements_that_make_no_sense_are_refused(overrides: Any, placement: str, told: str, placed_of) -> None:
    with pytest.raises(RecipeError, match=told):
        placed_of(*overrides, placement=placement)
