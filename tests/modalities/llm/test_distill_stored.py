"""A teacher's most probable tokens on disk: the formula, what is kept and when it is computed anew, room, runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from luthier.common.errors import RecipeError
from luthier.common.training.run import train
from luthier.modalities.llm.losses.divergence import divergence, top, top_divergence

KIND = "llm.distill"
MIXTURES = [0.0, 0.2, 0.5, 1.0]


def softmax(logits: Any) -> Any:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def bucketed(student: Any, teacher: Any, k: int, mixture: float, temperature: float) -> Any:
    """[N] by the definition, in float64: the k most probable ids of the teacher, and one outcome for all others."""
    q, p = softmax(student / temperature), softmax(teacher / temperature)
    ids = np.argsort(-p, axis=1)[:, :k]
    q, p = (np.take_along_axis(one, ids, axis=1) for one in (q, p))
    q, p = (np.concatenate([one, 1 - one.sum(axis=1, keepdims=True)], axis=1) for one in (q, p))

    def kl(first: Any, second: Any) -> Any:
        return (first * np.log(first / second)).sum(axis=1)

    if mixture in (0, 1):
        return kl(p, q) if mixture == 0 else kl(q, p)
    m = mixture * p + (1 - mixture) * q
    return mixture * kl(p, m) + (1 - mixture) * kl(q, m)


# ------------------------------------------------------------------------------------------------ formula


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_rest_is_one_outcome_forward_and_gradient(mixture: float, temperature: float) -> None:
    random = np.random.default_rng(0)
    student, teacher = random.normal(0, 2, (3, 9)), random.normal(0, 2, (3, 9))
    given = torch.tensor(student, requires_grad=True)
    kept = top(torch.tensor(teacher), 4, 9, temperature)
    found = top_divergence(given, kept, 9, mixture, temperature)
    wanted = bucketed(student, teacher, 4, mixture, temperature)
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-5)
    found.sum().backward()
    for place in np.ndindex(student.shape):
        step = np.zeros_like(student)
        step[place] = 1e-6
        up, down = (bucketed(student + sign * step, teacher, 4, mixture, temperature).sum() for sign in (1, -1))
        assert float(given.grad[place]) == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_with_all_ids_it_is_the_full_divergence_and_else_below(mixture: float) -> None:
    """Value and gradient; the more ids, the nearer. Tables of 20 and 12 rows share 12 ids (fault 24)."""
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 20, requires_grad=True), 2 * torch.randn(5, 12)
    full = divergence(student, teacher, mixture, 1.5)
    (wanted,) = torch.autograd.grad(full.sum(), student)
    for k in (12, 30):
        found = top_divergence(student, top(teacher, k, 12, 1.5), 12, mixture, 1.5)
        torch.testing.assert_close(found, full, rtol=1e-5, atol=1e-6)
        (gradient,) = torch.autograd.grad(found.sum(), student)
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    values = [top_divergence(student, top(teacher, k, 12, 1.5), 12, mixture, 1.5).detach() for k in (1, 3, 6, 11)]
    assert all((less <= more + 1e-6).all() for less, more in zip(values, [*values[1:], full.detach()], strict=True))
    assert (values[0] < full.detach()).all()


def test_a_rest_far_below_the_precision_of_1_keeps_its_digits() -> None:
    """1 minus the others would be 0 in float32, and its logarithm infinite."""
    student, teacher = torch.tensor([[30.0, 0.0, 1.0]], requires_grad=True), torch.tensor([[40.0, 2.0, 0.0]])
    for mixture in MIXTURES:
        found = top_divergence(student, top(teacher, 1, 3), 3, mixture)
        assert torch.isfinite(found).all()
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert torch.isfinite(gradient).all()
    log_rest = np.log(np.exp(2.0) + 1) - 40
    assert float(top(teacher, 1, 3).rest) == pytest.approx(log_rest, rel=1e-6)


# ------------------------------------------------------------------------------------------------ stored


@pytest.fixture
def made(task_of, model_of):
    def make(*overrides: str, teacher: Any = None, **options: Any) -> Any:
        return task_of(f"model.teacher={teacher or model_of('qwen3', 'chatml', 500)}", *overrides, kind=KIND, **options)

    return make


def files(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*.top")}


@pytest.mark.parametrize("k", [4, 1000])
def test_fault_19_what_is_stored_gives_the_live_loss(k: int, made, tmp_path: Path, monkeypatch) -> None:
    """Loss and gradients, with the teacher's table padded (fault 24) and logits in chunks; with all ids it is the loss
    of the teacher itself. The teacher is gone afterwards."""
    from luthier.common import losses

    common = ("task.divergence=js", "task.sft_weight=0.3")
    live, ahead = made(*common), made(*common, f"task.top_k={k}", output="ahead")
    monkeypatch.setitem(losses.CHUNK, "cpu", 1)
    fresh = ahead.task.loss(ahead.batch([0, 1, 2]).data)  # before it is stored: by the teacher
    ahead.task.look_ahead(ahead.examples, tmp_path)
    assert ahead.task.teacher is None
    assert not [name for name, _ in ahead.task.named_parameters() if "teacher" in name]
    found = ahead.task.loss(ahead.batch([0, 1, 2]).data)
    assert ahead.task.teacher is None
    assert float(found.sum.detach()) == pytest.approx(float(fresh.sum.detach()), rel=1e-5)
    expected = live.task.loss(live.batch([0, 1, 2]).data)
    if k == 4:
        assert found.logs["divergence"] < expected.logs["divergence"]
        return
    assert float(found.sum.detach()) == pytest.approx(float(expected.sum.detach()), rel=1e-5)
    found.sum.backward()
    expected.sum.backward()
    theirs = dict(live.task.model.named_parameters())
    largest = max(float(one.grad.abs().max()) for one in theirs.values())
    for name, parameter in ahead.task.model.named_parameters():
        assert float((parameter.grad - theirs[name].grad).abs().max()) <= 1e-5 * largest, name


def test_fault_19_it_is_kept_by_content(made, model_of, tmp_path: Path) -> None:
    """Read again by the same; another teacher, k, temperature or loss mask is computed anew; so is a broken file."""
    first = made("task.top_k=3")
    first.task.look_ahead(first.examples, tmp_path)
    kept = files(tmp_path)
    assert len(kept) == len({one.documents[0].ids.tobytes() for one in first.examples})
    again = made("task.top_k=3", output="again")
    again.task.look_ahead(again.examples, tmp_path)
    assert files(tmp_path).keys() == kept.keys()
    known = len(kept)
    for number, (overrides, teacher) in enumerate(
        [(("task.top_k=4",), None), (("task.top_k=3", "task.temperature=2"), None), (("task.top_k=3",), model_of())]
    ):
        other = made(*overrides, teacher=teacher, output=f"other{number}")
        other.task.look_ahead(other.examples, tmp_path)
        assert len(files(tmp_path)) == known + len(kept)
        known += len(kept)
    masked = made("task.top_k=3", "data.turns=last", output="masked")
    masked.task.look_ahead(masked.examples, tmp_path)
    assert len(files(tmp_path)) > known
    value = float(again.task.loss(again.batch([0]).data).sum.detach())
    for file in kept:
        file.write_bytes(b"broken")
    assert float(again.task.loss(again.batch([0]).data).sum.detach()) == pytest.approx(value, rel=1e-5)
    assert again.task.teacher is not None


def test_without_room_it_says_how_much_is_needed(made, tmp_path: Path) -> None:
    """300 bytes for each file and 8 k + 4 for each token with loss bound what is written from above."""
    small = made("task.top_k=50", "task.max_gb=0.000001")
    with pytest.raises(RecipeError, match=r"don't fit") as error:
        small.task.look_ahead(small.examples, tmp_path)
    needed = sum((8 * 50 + 4) * int(one.documents[0].trained[1:].sum()) + 300 for one in small.examples)
    assert f"{needed / 1e9:.3g} GB" in str(error.value)
    roomy = made("task.top_k=50", output="roomy")
    roomy.task.look_ahead(roomy.examples, tmp_path)
    size = sum(file.stat().st_size for file in files(tmp_path))
    assert 0.8 * needed < size <= needed


def test_a_run_trains_without_its_teacher_and_resumes_from_what_is_stored(recipe_of, model_of, left) -> None:
    common = (f"model.teacher={model_of('qwen3')}", "task.top_k=1000", "data.batch.examples=4", "train.epochs=3")
    live = train(recipe_of(*(one for one in common if "top_k" not in one), kind=KIND, output="live")).folder
    stored = train(recipe_of(*common, kind=KIND, output="stored")).folder
    assert left.values(stored) == pytest.approx(left.values(live), rel=1e-3)
    assert files(stored / "teacher")
