"""Two processes train as one with their batches together: documents of both are negatives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from luthier.common.training.run import train

SGD = ("optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.learning_rate=0.1")
JOBS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "hard": ("task.loss.hardness=2.0", "task.loss.symmetric=false"),
    "cached": ("train.gradient_checkpointing=true", "data.batch.chunk_tokens=12"),
}
RUN = """
import json, os, sys
import torch
os.fsync = lambda _: None
from luthier.common import reading
from luthier.common.training.run import train
for tree in json.loads(open(sys.argv[1]).read()):
    train(reading.build(tree, "test.yaml"))
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, bert_of, rows_of, pairs, tree_of) -> Path:
    """All of these trainings on 2 processes of 4 rows each, in one launch."""
    root = tmp_path_factory.mktemp("two")
    rows = rows_of(root / "rows.jsonl", pairs(16))
    model = bert_of("BertModel", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    changes = ("train.devices=2", "train.strategy=ddp", f"data.validation={rows}", "checkpoint.best=loss")
    trees = [
        tree_of(model, rows, root / name, *SGD, *changes, *overrides).model_dump(mode="json")
        for name, overrides in JOBS.items()
    ]
    (root / "trees.json").write_text(json.dumps(trees))
    (root / "run.py").write_text(RUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LUTHIER_OUTPUT": ""}
    environment.pop("LUTHIER_OUTPUT")
    done = subprocess.run(
        [sys.executable, str(root / "run.py"), str(root / "trees.json")], capture_output=True, text=True, check=False,
        env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("name", JOBS)
def test_fault_3_two_processes_equal_one_with_the_whole_batch(
    name: str, two: Path, tree_of, bert_of, left, tmp_path, monkeypatch
) -> None:
    """Batches 2n and 2n + 1 of 4 rows, one on each rank, are what one process has as a batch of 8: the order of an
    epoch is the same, and unsorted batches are cut from it one after the other."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    model = bert_of("BertModel", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rows = two / "rows.jsonl"
    changes = (f"data.validation={rows}", "checkpoint.best=loss", "data.batch.examples=8")
    train(tree_of(model, rows, tmp_path / "one", *SGD, *changes, *JOBS[name]))
    expected, found = left.weights(tmp_path / "one"), left.weights(two / name)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert float((found[key] - value).abs().max()) <= 1e-6, key
    for curve in ("train/loss", "train/gradient_norm", "validation/loss", "validation/ndcg@10"):
        wanted = left.values(tmp_path / "one", curve)
        assert wanted
        assert left.values(two / name, curve) == pytest.approx(wanted, rel=1e-5), curve
