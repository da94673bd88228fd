"""The loss of a batch, and its gradient, are those of sentence-transformers on the same texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder import losses as rerank
from sentence_transformers.sentence_transformer import losses

from luthier.common.errors import DataError

SCORED = [
    {"sentence1": f"ask {a}1 b{n}", "sentence2": f"tell {a}{n} c2 d3", "score": n / 8} for n, a in enumerate("abcdefgh")
]


def gradients(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-5 * max(1.0, float(value.abs().max())), name


def theirs_on(
    model: SentenceTransformer, loss: Any, columns: list[list[str]], labels: torch.Tensor | None
) -> torch.Tensor:
    model.train()
    for module in model.modules():
        module.train()
    value = loss([model.preprocess(texts) for texts in columns], labels)
    value.backward()
    return value


@pytest.mark.parametrize(
    ("name", "reference", "needs"),
    [
        ("contrastive", losses.MultipleNegativesRankingLoss, "pairs"),
        ("cosent", losses.CoSENTLoss, "scored"),
        ("angle", losses.AnglELoss, "scored"),
        ("cosine", losses.CosineSimilarityLoss, "scored"),
    ],
)
def test_losses_are_those_of_sentence_transformers(name: str, reference: Any, needs: str, task_of, pairs) -> None:
    rows = pairs(8) if needs == "pairs" else SCORED
    made = task_of(f"task.loss={name}", "data.batch.chunk_tokens=20", rows=rows)
    made.task.train_mode()
    found = made.task.loss(made.batch(range(8)).data)
    (found.sum / found.count).backward()
    model = SentenceTransformer(made.recipe.model.path, device="cpu")
    names = ("anchor", "positive") if needs == "pairs" else ("sentence1", "sentence2")
    labels = None if needs == "pairs" else torch.tensor([row["score"] for row in rows])
    expected = theirs_on(model, reference(model), [[row[n] for row in rows] for n in names], labels)
    assert float(found.sum / found.count) == pytest.approx(float(expected), rel=1e-5)
    same(gradients(made.task.model.parts), gradients(model))


def test_matryoshka_is_that_of_sentence_transformers(task_of, pairs) -> None:
    made = task_of("task.matryoshka.dimensions=[32, 16, 4]", "task.matryoshka.weights=[1, 0.5, 0.25]", rows=pairs(8))
    made.task.train_mode()
    found = made.task.loss(made.batch(range(8)).data)
    (found.sum / found.count).backward()
    model = SentenceTransformer(made.recipe.model.path, device="cpu")
    inner = losses.MultipleNegativesRankingLoss(model)
    loss = losses.MatryoshkaLoss(model, inner, [32, 16, 4], matryoshka_weights=[1, 0.5, 0.25])
    rows = pairs(8)
    expected = theirs_on(model, loss, [[row[n] for row in rows] for n in ("anchor", "positive")], None)
    assert float(found.sum / found.count) == pytest.approx(float(expected), rel=1e-5)
    same(gradients(made.task.model.parts), gradients(model))


def test_fault_1_a_duplicate_of_the_positive_is_no_negative(task_of) -> None:
    """Three queries share one document: each has no negatives at all, so the loss is 0, where documents as negatives
    would give ln 3."""
    rows = [{"anchor": f"ask a{n}", "positive": "tell b1"} for n in range(3)]
    made = task_of(rows=rows)
    found = made.task.loss(made.batch(range(3)).data)
    assert found.count == 3
    assert float(found.sum) == 0.0


def test_known_positives_of_other_rows_are_no_negatives(task_of) -> None:
    """Query a1 has two positives in two rows; each row's document is no negative of the other's query."""
    rows = [
        {"anchor": "ask a1", "positive": "tell b1"},
        {"anchor": "ask a1", "positive": "tell b2"},
        {"anchor": "ask a3", "positive": "tell b3"},
    ]
    made = task_of(rows=rows)
    data = made.batch(range(3)).data
    found = made.task.loss(data)
    vectors = made.task.embed(data)
    scores = made.task.compare(vectors[data["queries"]], vectors[data["documents"]]) / 0.05
    one = torch.nn.functional.softplus(scores[0, 2] - scores[0, 0]) + torch.nn.functional.softplus(
        scores[1, 2] - scores[1, 1]
    )
    other = torch.nn.functional.softplus(scores[2, :2].logsumexp(0) - scores[2, 2])
    assert float(found.sum) == pytest.approx(float(one + other), rel=1e-5)


def test_fault_2_cached_batches_have_the_gradient_of_the_whole(task_of, pairs) -> None:
    found = []
    for changes in (("data.batch.chunk_tokens=10", "train.gradient_checkpointing=true"), ()):
        made = task_of(*changes, rows=pairs(12), model={})  # with dropout off in eval mode
        made.task.eval()
        loss = made.task.loss(made.batch(range(12)).data)
        (loss.sum / loss.count).backward()
        found.append(gradients(made.task.model))
    assert found[0].keys() == found[1].keys()
    for name, value in found[1].items():
        assert float((found[0][name] - value).abs().max()) <= 1e-6 * max(1.0, float(value.abs().max())), name


def test_fault_6_dropout_is_on_in_training(task_of, pairs) -> None:
    made = task_of(rows=pairs(8), model={})
    made.task.train_mode()
    dropouts = [module for module in made.task.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(dropouts) > 3
    assert all(module.training for module in dropouts)
    data = made.batch(range(8)).data
    assert float(made.task.loss(data).sum) != float(made.task.loss(data).sum)


def test_fault_14_rows_without_negatives_have_those_of_the_batch(task_of) -> None:
    rows = [{"anchor": f"ask a{n}", "positive": f"tell b{n}", "negatives": [] if n else ["tell c1"]} for n in range(3)]
    made = task_of(rows=rows)
    found = made.task.loss(made.batch([1, 2]).data)
    assert found.count == 2
    assert torch.isfinite(found.sum)


def test_negatives_of_the_batch_can_be_left_out(task_of) -> None:
    rows = [{"anchor": f"ask a{n}", "positive": f"tell b{n}", "negatives": [f"tell c{n}"]} for n in range(3)]
    made = task_of("task.loss.in_batch_negatives=false", rows=rows)
    data = made.batch(range(3)).data
    alone = [float(made.task.loss(made.batch([n]).data).sum) for n in range(3)]
    assert float(made.task.loss(data).sum) == pytest.approx(sum(alone), rel=1e-5)


# ------------------------------------------------------------------------------------------------ rerankers


def test_bce_is_that_of_sentence_transformers(task_of) -> None:
    rows = [{"query": f"ask a{n} b1", "document": f"tell {'c2 ' * n}d{n}", "label": n % 2} for n in range(8)]
    made = task_of(kind="embedding.reranker", rows=rows, model={"num_labels": 1, "hidden_dropout_prob": 0.0,
                                                                "attention_probs_dropout_prob": 0.0})  # fmt: skip
    made.task.train_mode()
    found = made.task.loss(made.batch(range(8)).data)
    (found.sum / found.count).backward()
    model = CrossEncoder(made.recipe.model.path, device="cpu", num_labels=1)
    model.train()
    loss = rerank.BinaryCrossEntropyLoss(model)
    columns = [[row[name] for row in rows] for name in ("query", "document")]
    expected = loss(columns, torch.tensor([float(row["label"]) for row in rows]))
    expected.backward()
    assert float(found.sum / found.count) == pytest.approx(float(expected), rel=1e-5)
    same(gradients(made.task.model.parts), gradients(model))


@pytest.mark.parametrize(
    ("name", "reference"),
    [("listnet", rerank.ListNetLoss), ("ranknet", rerank.RankNetLoss), ("lambda", rerank.LambdaLoss)],
)
def test_listwise_losses_are_those_of_sentence_transformers(name: str, reference: Any, task_of) -> None:
    rows = [
        {"query": f"ask a{n}", "documents": [f"tell b{n} c{m}" for m in range(4)], "labels": [1, 0, 0, 0]}
        for n in range(3)
    ]
    made = task_of(f"task.loss={name}", kind="embedding.reranker", rows=rows, model={
        "num_labels": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})  # fmt: skip
    made.task.train_mode()
    found = made.task.loss(made.batch(range(3)).data)
    (found.sum / found.count).backward()
    model = CrossEncoder(made.recipe.model.path, device="cpu", num_labels=1)
    model.train()
    labels = [torch.tensor([float(x) for x in row["labels"]]) for row in rows]
    expected = reference(model)([[row["query"] for row in rows], [row["documents"] for row in rows]], labels)
    expected.backward()
    assert float(found.sum / found.count) == pytest.approx(float(expected), rel=1e-5)
    same(gradients(made.task.model.parts), gradients(model))


def test_fault_13_groups_stay_together(task_of) -> None:
    """Two queries of 8 documents in a batch of 4 rows: the loss is that of each alone."""
    rows = [
        {"query": f"ask a{n}", "documents": [f"tell b{m}" for m in range(8)], "labels": [1, *[0] * 7]} for n in range(2)
    ]
    made = task_of("task.loss=group_softmax", kind="embedding.reranker", rows=rows, model={"num_labels": 1})
    made.task.eval()
    both = made.task.loss(made.batch([0, 1]).data)
    alone = [float(made.task.loss(made.batch([n]).data).sum) for n in range(2)]
    assert both.count == 2
    assert float(both.sum) == pytest.approx(sum(alone), rel=1e-5)


def test_a_reranker_is_evaluated_with_the_scores_of_the_stage_before_it(task_of) -> None:
    """`own + 2 scores`; its loss is of its own; without scores it is refused."""
    documents = ["tell b0", "tell b1", "tell b2"]
    rows = [
        {"query": f"ask a{n}", "documents": documents, "labels": [1, 0, 0], "scores": [n, 1, 0.5]} for n in range(2)
    ]
    options = {"kind": "embedding.reranker", "rows": rows, "model": {"num_labels": 1}}
    made = task_of("task.loss=group_softmax", "evaluate.metrics=[reranking]", "evaluate.first_stage=2", **options)
    made.task.eval()
    batch = made.batch([0, 1])
    own = made.task.logits(batch.data).detach().view(2, 3).double()
    predicted = made.task.predict(batch)
    first = torch.tensor([[0, 1, 0.5], [1, 1, 0.5]])
    for record, expected in zip(predicted.records, own + 2 * first, strict=True):
        assert record.scores[:, 0] == pytest.approx(expected.numpy(), rel=1e-5)
    assert float(predicted.loss.sum) == pytest.approx(float(-own.log_softmax(1)[:, 0].sum()), rel=1e-5)
    bare = [{name: value for name, value in row.items() if name != "scores"} for row in rows]
    without = task_of("evaluate.first_stage=2", **{**options, "rows": bare})
    with pytest.raises(DataError, match="luthier mine --scores"):
        without.task.predict(without.batch([0]))


def test_fault_5_the_classifier_of_the_softmax_loss_is_in_the_checkpoint(recipe_of, left, tmp_path: Path) -> None:
    from luthier.common.training.run import train

    rows = [{"premise": f"ask a{n}", "hypothesis": f"tell b{n}", "label": n % 3} for n in range(12)]
    changes = ("task.loss=softmax", "checkpoint.every=1", "evaluate.metrics=[similarity]")
    train(recipe_of(*changes, rows=rows))
    state = torch.load(left.checkpoints(tmp_path / "run")[-1] / "state" / "trainer.pt", weights_only=True)
    names = [name for name in state["state_dict"] if name.startswith("heads.0.")]
    assert len(names) == 2
