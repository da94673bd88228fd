"""Runs of every kind: they train, are evaluated, saved as sentence-transformers loads them, and go on bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

from luthier.common.checkpoint import directory
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train

DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
TWICE = ("train.accumulate=2", "train.epochs=2", "checkpoint.every=1")
KINDS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "dense": ("embedding.dense", (), {}),
    "cached": ("embedding.dense", ("train.gradient_checkpointing=true", "data.batch.chunk_tokens=16"), {}),
    "matryoshka": ("embedding.dense", ("task.matryoshka.dimensions=[32, 8]",), {}),
    "lora": ("embedding.dense", ("model.lora.rank=2", "model.lora.target_modules=[query, value]"), {}),
    "sparse": ("embedding.sparse", ("task.regularizer_warmup=0.5",), {}),
    "multi-vector": ("embedding.multi_vector", (), {}),
    "reranker": ("embedding.reranker", ("task.loss=lambda", "evaluate.metrics=[reranking]"), {"num_labels": 1}),
}


def rows_for(kind: str, pairs: Any, number: int) -> list[dict[str, Any]]:
    return pairs(number, negatives=3) if kind == "embedding.reranker" else pairs(number)


@pytest.mark.parametrize("name", KINDS)
def test_resumed_runs_are_bit_for_bit_the_same(name: str, recipe_of, left, pairs, tmp_path: Path) -> None:
    kind, overrides, changes = KINDS[name]
    options = {"kind": kind, "rows": rows_for(kind, pairs, 20), "model": {**DROPOUT, **changes}}
    whole = train(recipe_of(*TWICE, *overrides, **options)).folder
    steps = left.steps(whole)
    assert len(steps) >= 5
    for stop in (steps[0], steps[-2]):
        folder = tmp_path / f"stopped-{stop}"
        shutil.copytree(whole, folder, symlinks=True)
        for checkpoint in directory.committed(folder / "checkpoints"):
            if directory.step_of(checkpoint) > stop:
                shutil.rmtree(checkpoint)
        train(recipe_of(*TWICE, *overrides, **options).model_copy(update={"output": str(folder)}))
        assert left.curve(folder) == left.curve(whole)
        expected, found = left.weights(whole), left.weights(folder)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


LOADED = {
    "dense": SentenceTransformer,
    "lora": SentenceTransformer,
    "sparse": SparseEncoder,
    "multi-vector": MultiVectorEncoder,
    "reranker": CrossEncoder,
}


@pytest.mark.parametrize("name", LOADED)
def test_saved_models_load_with_sentence_transformers_and_score_the_same(
    name: str, recipe_of, left, pairs, rows_of, tmp_path: Path
) -> None:
    kind, overrides, changes = KINDS[name]
    validation = rows_of(tmp_path / "validation.jsonl", rows_for(kind, pairs, 9))
    recipe = recipe_of(
        f"data.validation={validation}", *overrides, kind=kind, rows=rows_for(kind, pairs, 12),
        model={**DROPOUT, **changes},
    )  # fmt: skip
    run = train(recipe).folder
    metrics = json.loads((run / "metrics.json").read_text())
    best = run / "checkpoints" / "best"
    again = evaluate_checkpoint(best).metrics
    for metric, value in metrics.items():
        if isinstance(value, float) and metric in again:
            assert again[metric] == pytest.approx(value, rel=1e-6), metric
    model = LOADED[name](str(best / "model"), device="cpu")
    queries, documents = ["ask a1 b2", "ask c3"], ["tell a1", "tell c3 d4 e5", "tell f6"]
    if kind == "embedding.reranker":
        scores = model.predict([(queries[0], text) for text in documents])
        assert np.isfinite(scores).all()
        return
    found = model.similarity(model.encode_query(queries), model.encode_document(documents))
    assert found.shape == (2, 3)
    assert torch.isfinite(torch.as_tensor(found)).all()
    card = (best / "model" / "README.md").read_text()
    assert "run" in card  # the training data's name
    assert str(tmp_path) not in card


def test_the_saved_model_gives_the_embeddings_of_the_training(task_of, pairs, tmp_path: Path) -> None:
    made = task_of("data.prompts.query='query: '", "data.prompts.document='passage: '", rows=pairs(4))
    made.task.save_pretrained(tmp_path / "model")
    made.task.eval()
    data = made.batch(range(4)).data
    with torch.no_grad():
        vectors = made.task.embed(data)
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    queries = model.encode_query([row["anchor"] for row in pairs(4)], convert_to_tensor=True)
    documents = model.encode_document([row["positive"] for row in pairs(4)], convert_to_tensor=True)
    assert torch.allclose(vectors[data["queries"]], queries, atol=1e-6)
    assert torch.allclose(vectors[data["documents"]], documents, atol=1e-6)


def test_fault_8_the_best_metric_is_resolved_before_training(recipe_of, tmp_path: Path) -> None:
    from luthier.common.errors import LuthierError

    with pytest.raises(LuthierError, match="ndcg@7"):
        train(recipe_of("checkpoint.best=ndcg@7"))
    assert not (tmp_path / "run").exists()


def test_fault_9_metrics_and_loss_do_not_depend_on_the_batch_size(recipe_of, pairs, rows_of, tmp_path: Path) -> None:
    validation = rows_of(tmp_path / "validation.jsonl", pairs(11))
    run = train(recipe_of(f"data.validation={validation}")).folder
    found = [
        evaluate_checkpoint(run / "checkpoints" / "best", "validation", [f"evaluate.batch={size}"]).metrics
        for size in (1, 4, 11)
    ]
    for other in found[1:]:
        for metric in ("ndcg@10", "mrr@10", "recall@1", "loss"):
            assert other[metric] == pytest.approx(found[0][metric], rel=1e-5), metric


def test_a_training_teaches(recipe_of, pairs, rows_of, tmp_path: Path) -> None:
    """Retrieval of the training pairs themselves gets better by far in a few epochs."""
    file = rows_of(tmp_path / "same.jsonl", pairs(24))
    changes = (
        f"data.validation={file}",
        "train.epochs=15",
        "evaluate.at_start=true",
        "evaluate.every=30",
        "optim.learning_rate=3e-3",
    )
    run = train(recipe_of(*changes, rows=24)).folder
    history = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert history[0]["ndcg@10"] < 0.95
    assert history[-1]["ndcg@10"] > 0.99
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]


def test_fault_7_metrics_of_all_families_have_names_of_their_own() -> None:
    from luthier.modalities.embedding.config import EmbeddingEvaluate
    from luthier.modalities.embedding.evaluation.names import metrics_of

    families = ("retrieval", "reranking", "similarity", "triplet", "classification", "clustering")
    each = [set(metrics_of(EmbeddingEvaluate(metrics=(name,)))) - {"loss"} for name in families]
    assert sum(map(len, each)) == len(set.union(*each))
