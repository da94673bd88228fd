"""KTO: formulas, what the KL is estimated from, the reference, evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.modalities.llm.losses.kto import apo_zero_unpaired, kl_estimate, kto

KIND = "llm.kto"
LORA = ("model.lora.target_modules=all-linear", "model.lora.rank=2")
ROWS = [
    {"prompt": f"What of {number}?", "completion": f"It is {'two ' * (number % 4)}five." if number % 3 else "No.",
     "label": number % 3 > 0}
    for number in range(9)
]  # fmt: skip


def sigma(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def test_fault_22_the_loss_is_trl_s_forward_and_gradient() -> None:
    """TRL 1.16, KTOTrainer._compute_loss: w_d (1 - sigma(b (r - z))) and w_u (1 - sigma(b (z - r))), of
    apo_zero_unpaired 1 - sigma(b r) and sigma(b r); z is the mean over mismatched answers, at least 0."""
    random = np.random.default_rng(0)
    ratio, desirable, other = random.normal(0, 3, 6), np.array([1, 0, 0, 1, 1, 0], dtype=bool), random.normal(1, 2, 4)
    given = torch.tensor(ratio, requires_grad=True)
    z = kl_estimate(torch.tensor(other, requires_grad=True))
    assert not z.requires_grad
    assert float(z) == pytest.approx(max(0.0, other.mean()))
    found = kto(given, torch.tensor(desirable), z, 0.4, 1.3, 0.7)
    sign = np.where(desirable, 1, -1)
    inner = sign * 0.4 * (ratio - float(z))
    weight = np.where(desirable, 1.3, 0.7)
    np.testing.assert_allclose(found.detach().numpy(), weight * (1 - sigma(inner)), rtol=1e-6)
    found.sum().backward()
    slope = -weight * sign * 0.4 * sigma(inner) * (1 - sigma(inner))
    np.testing.assert_allclose(given.grad.numpy(), slope, rtol=1e-6)
    apo = apo_zero_unpaired(torch.tensor(ratio), torch.tensor(desirable), 0.4)
    np.testing.assert_allclose(apo, np.where(desirable, 1 - sigma(0.4 * ratio), sigma(0.4 * ratio)), rtol=1e-12)


def test_the_estimate_is_never_negative_and_0_of_nothing() -> None:
    assert float(kl_estimate(torch.tensor([-3.0, 1.0]))) == 0
    assert float(kl_estimate(torch.zeros(0))) == 0


def test_fault_22_no_answer_is_paired_with_its_own_prompt(task_of) -> None:
    """Also of 9 rows in batches of any size, and where neighbours have the same prompt."""
    same = [ROWS[0], {**ROWS[0], "completion": "Rome"}, *ROWS[1:]]
    made = task_of(kind=KIND, rows=same)
    decode = made.task.processing.tokenizer.decode
    for example in made.examples:
        own, mixed = (decode(example.group.document(at).ids) for at in range(2))
        question = own.split("<|im_end|>")[0]
        assert mixed.split("<|im_end|>")[0] == question
        donors = [row for row in same if f"assistant\n{row['completion']}<" in mixed]
        assert any(row["prompt"] not in question for row in donors)
    alone = task_of(kind=KIND, rows=[ROWS[0], {**ROWS[0], "completion": "Rome"}])
    assert [len(example.group.rests) for example in alone.examples] == [1, 1]
    assert float(alone.task.loss(alone.batch([0, 1]).data).logs["kl"]) == 0


@pytest.mark.parametrize("overrides", [(), LORA, ("task.precompute_reference=true",)], ids=["full", "lora", "ahead"])
def test_at_the_start_each_answer_counts_a_half(overrides: tuple[str, ...], task_of, tmp_path: Any) -> None:
    """1 - sigma(0), times the weight of its kind."""
    made = task_of(*overrides, "task.desirable_weight=3", kind=KIND, rows=ROWS)
    made.task.look_ahead(made.examples, tmp_path)
    made.task.train_mode()
    loss = made.task.loss(made.batch([0, 1, 2, 3]).data)  # bad, good, good, bad
    assert loss.count == 4
    assert float(loss.sum.detach()) == pytest.approx((3 + 3 + 1 + 1) / 2, rel=1e-5)
    loss.sum.backward()
    assert any(p.grad is not None and p.grad.any() for p in made.task.model.parameters())


def test_the_loss_of_a_batch_from_its_log_ratios(task_of, model_of) -> None:
    made = task_of(f"model.reference={model_of('qwen3')}", "task.beta=0.05", kind=KIND, rows=ROWS)
    data = made.batch([0, 1, 2]).data
    with torch.no_grad():
        hidden = made.task._run(data).last_hidden_state[0]
        ratios = made.task.answer_log_probs(hidden, data) - made.task.reference_log_probs(data)
    own, other = ratios.double().numpy().reshape(3, 2).T
    z = max(0.0, other.mean())
    sign = np.array([-1, 1, 1])
    loss = made.task.loss(data)
    assert float(loss.sum.detach()) == pytest.approx((1 - sigma(sign * 0.05 * (own - z))).sum(), rel=1e-5)
    assert loss.logs["kl"] == pytest.approx(3 * z, rel=1e-5, abs=1e-6)


def test_labels_that_are_no_labels_are_counted(task_of) -> None:
    report = task_of("data.max_bad=0.5", kind=KIND, rows=[*ROWS, {**ROWS[0], "label": "good"}]).report
    assert report.dropped == {"bad_label": 1}


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_it_learns_and_its_evaluation_does_not_depend_on_the_batch(
    loss: str, recipe_of, rows_of, left, tmp_path
) -> None:
    file = rows_of(tmp_path / "validation.jsonl", ROWS)
    overrides = (
        f"data.validation={file}", "evaluate.at_start=true", "train.epochs=6", "optim.learning_rate=3e-3",
        f"task.loss={loss}",
    )  # fmt: skip
    folder = train(recipe_of(*overrides, kind=KIND, rows=ROWS)).folder
    losses = left.values(folder, "validation/loss")
    assert losses[0] == pytest.approx(0.5, rel=1e-5)
    assert losses[-1] < 0.45
    one, many = (
        evaluate_checkpoint(folder / "checkpoints" / "last", overrides=[f"evaluate.batch={size}"]).metrics
        for size in (1, 9)
    )
    assert one["loss"] == pytest.approx(many["loss"], rel=1e-5) == pytest.approx(losses[-1], rel=1e-5)
    assert one["desirable_reward"] > one["undesirable_reward"]
