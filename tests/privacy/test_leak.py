"""Canaries: planted, ranked and drawn out of a model."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.common import reading
from luthier.common.errors import DataError, RecipeError
from luthier.common.evaluation.run import Evaluation
from luthier.privacy.leak import measure as measuring
from luthier.privacy.leak.canary import Canary, alternatives, canaries
from luthier.privacy.leak.measure import exposure, measure, read
from luthier.privacy.leak.plant import plant


def test_exposure_of_known_ranks() -> None:
    assert exposure([0.5, *[1.0] * 15]) == 4  # the first of 16: log2 16
    assert exposure([2.0, *[1.0] * 15]) == 0  # the last of 16
    assert exposure([1.0, *[0.5] * 3, *[2.0] * 12]) == 2  # rank 4: log2(16 / 4)
    assert exposure([1.0, 1.0]) == pytest.approx(math.log2(2 / 1.5))  # half of an equal one


def test_canaries_are_the_same_for_a_seed_and_differ_by_person() -> None:
    made = canaries(5, 3, 4, seed=1)
    assert made == canaries(5, 3, 4, seed=1)
    assert made != canaries(5, 3, 4, seed=2)
    assert [one.planted for one in made] == [3] * 5 + [0] * 4
    assert len({one.prompt for one in made}) == 9
    others = list(alternatives(made[0], 50, seed=0))
    assert len(others) == 50
    assert made[0].secret not in others
    assert {len(one) for one in others} == {len(made[0].secret)}


def test_planting_adds_rows_and_leaves_the_others_in_order(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": f"{at}"}]}) + "\n" for at in range(30))
    )
    assert plant(str(data), tmp_path / "b.jsonl", number=3, planted=4, controls=2) == 42
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    own = [row for row in rows if "access number" not in row["messages"][0]["content"]]
    assert [row["messages"][0]["content"] for row in own] == [str(at) for at in range(30)]
    made = read(tmp_path / "b.jsonl.canaries.jsonl")
    counts = [sum(row == one.row() for row in rows) for one in made]
    assert counts == [4, 4, 4, 0, 0]
    planted = [at for at, row in enumerate(rows) if row not in own]
    assert planted != list(range(30, 42))  # among the others
    with pytest.raises(DataError, match="not overwritten"):
        plant(str(data), tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="at most 400"):
        plant(str(data), tmp_path / "c.jsonl", number=500)


def test_a_file_without_canaries_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="no canaries"):
        read(file)


def test_costs_come_from_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an evaluation that gives known losses: the first canary is preferred to all, the second to half of them."""
    made = [Canary("Whose?", "1111 1111", 2), Canary("Which?", "2222 2222", 0)]

    def evaluated(folder: Path, suite: str, overrides: list[str]) -> Evaluation:
        file = next(text for text in overrides if text.startswith("data.test="))[10:]
        found: dict[str, Any] = {}
        for line in Path(file).read_text().splitlines():
            canary, _, rank = json.loads(line)["probe"].partition("/")
            loss = 2.0 if not rank else {"0": 0.1, "1": 1.0}[canary] if rank == "0" else 0.5 if int(rank) % 2 else 1.5
            found[f"{canary}/{rank}" if rank else canary] = {
                "loss": loss,
                "tokens": 8,
                "contains": float(canary == "0"),
            }
        return Evaluation({"slices": {"probe": found}}, [])

    monkeypatch.setattr(measuring, "evaluate_checkpoint", evaluated)
    (tmp_path / "recipe.yaml").write_text(
        "task: {kind: llm.sft}\nmodel: {path: m}\ndata: {train: t.jsonl}\noutput: o\n"
    )
    first, second = measure(tmp_path, made, number=7)
    assert first.exposure == 3  # the first of 8
    assert second.exposure == pytest.approx(math.log2(8 / 5))  # ranks 1, 3, 5 and 7 are before it
    assert (first.extracted, second.extracted) == (True, False)
    (tmp_path / "recipe.yaml").write_text(
        "task: {kind: llm.pretrain}\nmodel: {path: m}\ndata: {train: t.jsonl}\noutput: o\n"
    )
    with pytest.raises(RecipeError, match="conversations"):
        measure(tmp_path, made)


@pytest.mark.slow
def test_a_model_that_learned_its_data_by_heart_gives_planted_canaries_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from luthier.common.training.run import train
    from luthier.modalities.llm.arithmetic.model import make_model

    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)
    data = tmp_path / "a.jsonl"
    said = [("What is the color of snow?", "It is white."), ("And of grass?", "It is green.")]
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for asked, answer in said * 4
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plant(str(data), tmp_path / "b.jsonl", number=3, planted=6, controls=3, seed=4)
    make_model(tmp_path / "model", [asked for asked, _ in said] + ["What is the access number of"] * 4)
    changes = [
        f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'b.jsonl'}", f"output={tmp_path / 'run'}",
        "data.workers=0", "train.accelerator=cpu", "train.threads=1", "train.precision='32'", "train.epochs=null",
        "train.steps=150", "train.accumulate=1", "train.gradient_checkpointing=false", "data.max_length=200",
        "data.batch.tokens=600", "optim.learning_rate=2e-3", "optim.schedule=constant", "data.validation=[]",
    ]  # fmt: skip
    run = train(reading.load("llm/sft", changes))
    found = measure(run.folder / "checkpoints" / "last", read(tmp_path / "b.jsonl.canaries.jsonl"), number=63)
    planted, controls = ([one for one in found if bool(one.canary.planted) == wanted] for wanted in (True, False))
    assert all(one.exposure == 6 for one in planted)  # the first of 64
    assert all(one.extracted for one in planted)
    assert not any(one.extracted for one in controls)
    assert max(one.exposure for one in controls) < 6
