"""Engines and rewards on a Ray of two cores on this machine: what they give is what the trainer's process would give,
whatever happens to them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.errors import LuthierError
from luthier.common.losses import TokenLoss
from luthier.common.training.run import train
from luthier.modalities.llm.model import Head, load_model
from luthier.modalities.llm.rl.engines.engine import Completion, Sampling
from luthier.modalities.llm.rl.engines.local import LocalEngine
from luthier.modalities.llm.rl.engines.servers import OtherWeights
from luthier.modalities.llm.rl.placed.engine import PlacedEngine
from luthier.modalities.llm.rl.placed.section import PlacementSection, WorkersSection
from luthier.modalities.llm.rl.placed.weights import packed
from luthier.modalities.llm.rl.placed.workers import WorkerLost, Workers, connected

pytestmark = pytest.mark.slow

PROMPTS = [np.array(ids, np.int32) for ids in ([5], [7, 8, 9, 10, 11, 12], [3, 4, 5], [20, 21, 22, 23])]
SEEDS = [[10 * at + number for number in range(3)] for at in range(4)]
SAMPLING = Sampling(12, (17, 30, 41), 1.3)
ROWS = [{"prompt": f"What of {word}?"} for word in ("weather", "Rome", "sunny", "warm", "city", "name")]
REWARDS = """
def letters(answers):
    return [answer.completion.lower().count("e") / (1 + answer.tokens) for answer in answers]

def rank(answers):  # of a completion in its group
    def place(one):
        lengths = sorted(len(other.completion) for other in answers if other.row["number"] == one.row["number"])
        return lengths.index(len(one.completion))

    return [None if "a" in one.completion else place(one) for one in answers]
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    found = pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)
    found.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    found.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield found
    found.shutdown()
    signal.signal(signal.SIGTERM, handler)


class Echo:
    """A light worker."""

    def __init__(self, kept: str):
        self.kept, self.told = kept, 0

    def ready(self) -> str:
        return self.kept

    def tell(self, number: int) -> None:
        self.told = number

    def add(self, number: int) -> tuple[int, int]:
        return self.told + number, os.getpid()

    def fail(self) -> None:
        raise LuthierError("it can't", where="there", do="that")

    def hang(self) -> None:
        time.sleep(1000)

    def die(self) -> None:
        os._exit(1)


def workers(number: int = 2, **options: Any) -> Workers:
    section = WorkersSection(number=number, cpus=options.pop("cpus", 0.5))
    placement = PlacementSection(engines=section, **options)
    return Workers(Echo, ("kept",), "engines", section, placement)


def test_workers_are_asked_prepared_and_started_again(ray, caplog: pytest.LogCaptureFixture) -> None:
    made = workers()
    made.prepare(lambda actor: actor.tell.remote(100))
    found = made.map([lambda actor, at=at: actor.add.remote(at) for at in range(20)])
    assert [value for value, _ in found] == list(range(100, 120))
    assert len({number for _, number in found}) == 2, "both work"
    os.kill(found[0][1], signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        again = made.map([lambda actor, at=at: actor.add.remote(at) for at in range(20)])
    assert [value for value, _ in again] == list(range(100, 120)), "the new one was told too"
    assert "it is started again" in caplog.text
    with pytest.raises(LuthierError, match="it can't") as error:
        made.map([lambda actor: actor.fail.remote()])
    assert error.value.do == "that"


def test_bounds(ray) -> None:
    """A worker that dies each time, one that hangs, and one that finds no place."""
    for call, options in ((lambda actor: actor.die.remote(), {}), (lambda actor: actor.hang.remote(), {"timeout": 3})):
        with pytest.raises(WorkerLost, match="too often"):
            workers(1, restarts=1, **options).map([call])
    with pytest.raises(LuthierError, match="not there within 2 s"):
        workers(1, cpus=64, start_timeout=2).map([lambda actor: actor.add.remote(1)])


def test_the_handler_of_sigterm_stays(ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    before = signal.getsignal(signal.SIGTERM)
    connected("local")
    assert signal.getsignal(signal.SIGTERM) == before


def flat(made: list[list[Completion]]) -> list[Any]:
    return [(one.tokens.tolist(), one.log_probs.tobytes(), one.finished, one.version) for of in made for one in of]


def test_engines_draw_what_the_trainer_would_whatever_happens(ray, recipe_of, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of(
        "rewards=[{kind: exact}]", "data.max_length=60", "rollout.max_new_tokens=12",
        "rollout.placement={engines: {number: 2}}", rows=[{**ROWS[0], "answer": "a"}], kind="llm.grpo",
    )  # fmt: skip
    model, causal = load_model(recipe, hf.AutoTokenizer.from_pretrained(recipe.model.path), None)
    local = LocalEngine(causal.eval(), Head(causal, TokenLoss()), 6)  # each of the two draws 6 of 12
    placed = PlacedEngine(recipe, None)
    weights: Any = SimpleNamespace(model=model)
    with pytest.raises(OtherWeights, match="no weights yet"):
        placed.generate(PROMPTS, SAMPLING, SEEDS)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        for engine in (local, placed):
            engine.update(version, weights)
        expected = flat(local.generate(PROMPTS, SAMPLING, SEEDS))
        assert flat(placed.generate(PROMPTS, SAMPLING, SEEDS)) == expected
    whole = LocalEngine(causal, Head(causal, TokenLoss()), 64)
    assert [one[0] for one in flat(whole.generate(PROMPTS, SAMPLING, SEEDS))] == [one[0] for one in expected]

    actors = [place.actor for place in placed._workers._places]
    ids = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in actors]
    os.kill(ids[1], signal.SIGSTOP)  # so that it surely dies in the middle
    threading.Timer(2.0, lambda: os.kill(ids[1], signal.SIGKILL)).start()
    with caplog.at_level(logging.WARNING):
        assert flat(placed.generate(PROMPTS, SAMPLING, SEEDS)) == expected
    assert "it is started again" in caplog.text
    assert placed._workers._places[1].actor is not actors[1]

    stale = packed(model)
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    for engine in (local, placed):
        engine.update(3, weights)
    expected = flat(local.generate(PROMPTS, SAMPLING, SEEDS))
    ray.get(placed._workers._places[0].actor.load.remote(2, stale))
    with pytest.raises(OtherWeights, match="other weights"):
        placed._workers._result(actors[0].generate.remote(3, PROMPTS, SAMPLING, SEEDS), 60)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert flat(placed.generate(PROMPTS, SAMPLING, SEEDS)) == expected
    assert "it is given the right ones" in caplog.text


def test_a_training_with_placed_engines_and_rewards_is_the_same(ray, recipe_of, left, tmp_path: Path) -> None:
    """Losses, rewards and weights, bit for bit; one row's rewards are of its group, so that a group stays together."""
    (tmp_path / "own.py").write_text(REWARDS)
    functions = [f"{{kind: function, function: '{tmp_path}/own.py:{name}'}}" for name in ("letters", "rank")]
    rows = [{**row, "number": at} for at, row in enumerate(ROWS)]
    common = (
        "data.max_length=60", "rollout.max_new_tokens=5", "rollout.num_generations=3", "data.batch.examples=4",
        "train.epochs=null", "train.steps=3", f"rewards=[{', '.join(functions)}]", "rollout.batch=6",
    )  # fmt: skip
    here = train(recipe_of(*common, rows=rows, kind="llm.grpo", output="here")).folder
    placement = "rollout.placement={engines: {number: 2, cpus: 0.5}, rewards: {number: 2, cpus: 0.5}}"
    there = train(recipe_of(*common, placement, rows=rows, kind="llm.grpo", output="there")).folder
    for name in ("train/loss", "train/reward", "train/reward/rank", "train/unscored", "train/gradient_norm"):
        assert left.values(there, name) == left.values(here, name), name
    assert any(left.values(here, "train/unscored")), "a test of missing rewards too"
    for key, value in left.weights(here).items():
        assert torch.equal(left.weights(there)[key], value), key
