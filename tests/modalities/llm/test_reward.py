"""Reward models: which token is read, the head beside an adapter, losses, data, and transformers' own scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.errors import LuthierError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.modalities.llm.losses.bradley_terry import bradley_terry
from luthier.modalities.llm.losses.plackett_luce import plackett_luce

KIND = "llm.reward"
LORA = ("model.lora.target_modules=[q_proj, v_proj]", "model.lora.rank=2")
ROWS = [
    {"prompt": f"What of {number}?", "chosen": f"It is {'two ' * (number % 4)}five.", "rejected": "It is not.",
     "topic": "even" if number % 2 == 0 else "odd"}
    for number in range(10)
]  # fmt: skip
RANKED = [{"prompt": "What?", "ranked": ["It is two.", "It is three.", "Rome"]}, *ROWS[:3]]
JUDGED = [{"prompt": f"What of {n}?", "completion": "It is " + "two " * (n + 1), "label": n} for n in range(6)]


@pytest.fixture
def made(task_of):
    def make(*overrides: str, rows: Any = ROWS, **options: Any) -> Any:
        return task_of(*overrides, kind=KIND, rows=rows, **options)

    return make


def theirs(folder: Path, sequences: list[np.ndarray]) -> torch.Tensor:
    """[A, labels] transformers' own scores of sequences that are padded at the right, with the tokenizer beside it."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    pad = hf.AutoTokenizer.from_pretrained(folder).pad_token_id
    assert pad == model.config.get_text_config().pad_token_id
    longest = max(map(len, sequences))
    ids, mask = torch.full((len(sequences), longest), pad), torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, one in enumerate(sequences):
        ids[row, : len(one)], mask[row, : len(one)] = torch.from_numpy(one.astype(np.int64)), 1
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return found


def sequences(data: dict[str, Any]) -> list[np.ndarray]:
    return [group.document(at).ids for group in data["groups"] for at in range(len(group.rests))]


# ------------------------------------------------------------------------------------------------ losses


def test_bradley_terry_is_trl_s_forward_and_gradient() -> None:
    """TRL 1.16, RewardTrainer.compute_loss: -logsigmoid(chosen - rejected - margin) + c (chosen + rejected)^2."""
    random = np.random.default_rng(0)
    chosen, rejected, margin = (random.normal(0, 2, 5) for _ in range(3))
    tensors = [torch.tensor(one, requires_grad=True) for one in (chosen, rejected)]
    losses = bradley_terry(*tensors, torch.tensor(margin), 0.03)
    expected = np.logaddexp(0, -(chosen - rejected - margin)) + 0.03 * (chosen + rejected) ** 2
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-12)
    losses.sum().backward()
    slope = -1 / (1 + np.exp(chosen - rejected - margin))
    for tensor, sign in zip(tensors, (1, -1), strict=True):
        wanted = sign * slope + 2 * 0.03 * (chosen + rejected)
        np.testing.assert_allclose(tensor.grad.numpy(), wanted, rtol=1e-12)


def test_plackett_luce_is_the_probability_of_the_ranking() -> None:
    """Drawn one by one without replacement, each with a probability as its exponential; of two it is Bradley-Terry."""
    given = np.array([0.5, 2.0, -1.0, 0.3])
    scores = torch.tensor(given, requires_grad=True)
    loss = plackett_luce(scores)
    probability = np.prod([np.exp(given[at]) / np.exp(given[at:]).sum() for at in range(4)])
    assert float(loss.detach()) == pytest.approx(-np.log(probability), rel=1e-12)
    loss.backward()
    for at in range(4):
        step = np.eye(4)[at] * 1e-6
        up, down = (float(plackett_luce(torch.tensor(given + sign * step))) for sign in (1, -1))
        assert float(scores.grad[at]) == pytest.approx((up - down) / 2e-6, rel=1e-5)
    pair = torch.tensor([1.3, -0.4])
    torch.testing.assert_close(plackett_luce(pair, 0.1), bradley_terry(pair[:1], pair[1:], 0.0, 0.1)[0])


# ------------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "phi3", "gpt2"])
def test_scores_and_gradients_equal_transformers(family: str, made, tmp_path: Path) -> None:
    """Answers that share prompts in one row, against each alone in a padded batch of transformers."""
    built = made(model=family)
    data = built.batch([0, 1, 2, 7]).data
    built.task.save_pretrained(tmp_path)
    expected = theirs(tmp_path, sequences(data))
    _, found, _ = built.task._scored(data)
    scores = built.task._scored(data)[0]
    torch.testing.assert_close(scores.detach(), expected, rtol=1e-4, atol=1e-5)
    found["loss"].sum().backward()
    model = hf.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    single = torch.cat(
        [
            model(input_ids=torch.from_numpy(one.astype(np.int64))[None], use_cache=False).logits[0]
            for one in sequences(data)
        ]
    )
    (-torch.nn.functional.logsigmoid(single[::2] - single[1::2])).sum().backward()
    wanted = dict(model.named_parameters())
    largest = max(float(one.grad.abs().max()) for one in wanted.values() if one.grad is not None)
    for name, parameter in built.task.model.named_parameters():
        if wanted[name].grad is None:
            continue
        apart = (parameter.grad - wanted[name].grad).abs()
        if name.endswith(("embed_tokens.weight", "wte.weight")):  # transformers gives the padding's row no gradient
            apart[model.config.pad_token_id] = 0
        assert float(apart.max()) <= 2e-5 * largest, name


def test_fault_18_the_last_token_is_told_by_place(made, tmp_path: Path) -> None:
    """The padding of this tokenizer is its end token; the prompt and, as plain text, the end hold it."""
    rows = [{"prompt": "What <|endoftext|> of", "chosen": " it is five", "rejected": " Rome is warm and sunny"}]
    built = made("data.plain=true", rows=rows)
    data = built.batch([0]).data
    ends = [one[-1] for one in sequences(data)]
    eos = built.task.processing.tokenizer.eos_token_id
    assert ends == [eos, eos]
    assert (data["input_ids"] == eos).sum() > 2
    built.task.save_pretrained(tmp_path)
    torch.testing.assert_close(
        built.task._scored(data)[0].detach(), theirs(tmp_path, sequences(data)), rtol=1e-4, atol=1e-5
    )
    assert hf.AutoTokenizer.from_pretrained(tmp_path).pad_token_id != eos


@pytest.mark.parametrize("overrides", [(), LORA], ids=["full", "lora"])
def test_fault_18_the_head_is_saved_also_with_an_adapter(overrides: tuple[str, ...], recipe_of, task_of, left) -> None:
    recipe = recipe_of(*overrides, kind=KIND, rows=ROWS)
    folder = train(recipe).folder
    again = task_of(*overrides, kind=KIND, rows=ROWS, weights=left.model(folder))
    fresh = task_of(*overrides, kind=KIND, rows=ROWS)
    trained = [name for name in left.weights(folder) if "score" in name]
    assert len(trained) == 1
    head = again.task.scorer.score
    weight = head.modules_to_save["default"].weight if overrides else head.weight
    assert torch.equal(weight.detach(), left.weights(folder)[trained[0]])
    data = again.batch([0, 1]).data
    assert float((again.task._scored(data)[0] - fresh.task._scored(data)[0]).detach().abs().min()) > 1e-3
    if not overrides:
        expected = theirs(left.model(folder), sequences(data))
    else:
        from peft import PeftModel

        base = hf.AutoModelForSequenceClassification.from_pretrained(
            recipe.model.path, num_labels=1, dtype=torch.float32
        )
        loaded = PeftModel.from_pretrained(base, str(left.model(folder)))
        ids = [torch.from_numpy(one.astype(np.int64))[None] for one in sequences(data)]
        with torch.no_grad():
            expected = torch.cat([loaded(input_ids=one, use_cache=False).logits for one in ids])
    torch.testing.assert_close(again.task._scored(data)[0].detach(), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ training


def test_margins_of_the_rows_and_centering(made) -> None:
    rows = [{**row, "margin": number * 0.7} for number, row in enumerate(ROWS)]
    built = made("task.centering=0.05", rows=rows)
    data = built.batch([0, 1, 2]).data
    scores = built.task._scored(data)[0].detach()[:, 0].double().numpy().reshape(-1, 2)
    difference = scores[:, 0] - scores[:, 1] - np.array([0, 0.7, 1.4])
    expected = (np.logaddexp(0, -difference) + 0.05 * scores.sum(axis=1) ** 2).sum()
    loss = built.task.loss(data)
    assert loss.count == 3
    assert float(loss.sum.detach()) == pytest.approx(expected, rel=1e-5)
    assert loss.logs["margin"] == pytest.approx((scores[:, 0] - scores[:, 1]).sum(), rel=1e-4)


def test_rankings(made) -> None:
    built = made("task.loss=plackett_luce", rows=RANKED)
    data = built.batch([0, 1]).data
    scores = built.task._scored(data)[0].detach()[:, 0].double()
    loss = built.task.loss(data)
    expected = plackett_luce(scores[:3]) + plackett_luce(scores[3:])
    assert loss.count == 2
    assert float(loss.sum.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert made(rows=RANKED).task.loss(data).count == 4  # each pair alone


def test_regression_and_classes(made) -> None:
    built = made("task.loss=regression", rows=JUDGED)
    data = built.batch([1, 4]).data
    scores = built.task._scored(data)[0].detach()[:, 0].double().numpy()
    assert float(built.task.loss(data).sum.detach()) == pytest.approx(((scores - [1, 4]) ** 2).sum(), rel=1e-5)
    rows = [{**row, "label": ("bad", "good", "best")[number % 3]} for number, row in enumerate(JUDGED)]
    built = made("task.loss=classification", "task.labels=[good, bad, best]", rows=rows)
    data = built.batch([0, 1, 2]).data
    assert data["labels_of"] == [1, 0, 2]
    given = built.task._scored(data)[0].detach().double()
    expected = -(given.log_softmax(dim=1)[[0, 1, 2], [1, 0, 2]]).sum()
    assert float(built.task.loss(data).sum.detach()) == pytest.approx(float(expected), rel=1e-5)
    report = made("task.loss=regression", "data.max_bad=0.5", rows=[*JUDGED, {**JUDGED[0], "label": "much"}]).report
    assert report.dropped == {"bad_label": 1}


@pytest.mark.parametrize(
    ("loss", "rows"), [("bradley_terry", ROWS), ("plackett_luce", RANKED), ("regression", JUDGED)], ids=str
)
def test_it_learns_and_is_evaluated_by_slice(loss: str, rows: Any, recipe_of, rows_of, left, tmp_path: Path) -> None:
    file = rows_of(tmp_path / "validation.jsonl", rows)
    overrides = (
        f"task.loss={loss}", f"data.validation={file}", "evaluate.slices=[topic]", "evaluate.at_start=true",
        "train.epochs=6", "optim.learning_rate=3e-3",
    )  # fmt: skip
    folder = train(recipe_of(*overrides, kind=KIND, rows=rows)).folder
    losses = left.values(folder, "validation/loss")
    assert losses[-1] < 0.7 * losses[0]
    one, many = (
        evaluate_checkpoint(folder / "checkpoints" / "last", overrides=[f"evaluate.batch={size}"]).metrics
        for size in (1, 8)
    )
    assert one["loss"] == pytest.approx(many["loss"], rel=1e-4) == pytest.approx(losses[-1], rel=1e-4)
    if loss == "bradley_terry":
        assert one["accuracy"] > 0.8
        assert set(one["slices"]["topic"]) == {"even", "odd"}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("task.loss=classification",), "labels"),
        (("task.loss=regression", "task.centering=0.1"), "centering"),
        (("model.new_tokens=['<|note|>']",), "new_tokens"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(overrides: tuple[str, ...], problem: str, recipe_of) -> None:
    with pytest.raises(LuthierError, match=problem):
        recipe_of(*overrides, kind=KIND, rows=ROWS)
