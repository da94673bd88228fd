"""Preference optimisation: the reference, the loss at the start, updates, precomputed references, evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from luthier.common.errors import LuthierError, ModelError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train
from luthier.modalities.llm.dpo.config import Config

KIND = "llm.dpo"
WORDS = ["weather", "Rome", "sunny", "warm", "helpful", "add", "two", "three", "sum", "five"]
LORA = ("model.lora.target_modules=all-linear", "model.lora.rank=2")


def pair(number: int) -> dict[str, Any]:
    """Answers of different lengths to a question; they begin alike."""
    said = [WORDS[(number * 3 + at * at) % len(WORDS)] for at in range(2 + number % 5)]
    return {
        "prompt": f"What of {' '.join(said[:3])}?",
        "chosen": f"It is {' '.join(said)}.",
        "rejected": f"It is not {said[0]} {'at all ' * (number % 3)}today.",
        "topic": "even" if number % 2 == 0 else "odd",
    }


ROWS = [pair(number) for number in range(10)]
RANKED = [{"prompt": "What?", "ranked": ["It is two.", "It is three.", "Rome"]}, *ROWS[:3]]


@pytest.fixture
def made(task_of):
    def make(*overrides: str, rows: Any = ROWS, **options: Any) -> Any:
        return task_of(*overrides, kind=KIND, rows=rows, **options)

    return make


def sums(causal: Any, group: Any) -> Tensor:
    """[A] log-probability of each answer alone, by transformers' eager attention."""
    found = []
    for number in range(len(group.rests)):
        one = group.document(number)
        ids = torch.from_numpy(one.ids.astype(np.int64))
        logits = causal(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(dim=-1)
        found.append(logits.gather(1, ids[1:, None])[:, 0][torch.from_numpy(one.trained[1:])].sum())
    return torch.stack(found)


# ------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize(
    "overrides",
    [(), LORA, (*LORA, "model.lora.init=pissa"), ("task.precompute_reference=true",),
     ("train.gradient_checkpointing=true",)],
    ids=["full", "lora", "pissa", "precomputed", "checkpointing"],
)  # fmt: skip
def test_at_the_start_the_loss_is_ln_2(overrides: tuple[str, ...], made, tmp_path: Path) -> None:
    """Exactly: model and reference are the same numbers, whatever stands in the row."""
    built = made(*overrides)
    built.task.look_ahead(built.examples, tmp_path)
    built.task.train_mode()
    loss = built.task.loss(built.batch([0, 3, 4, 7]).data)
    assert loss.count == 4
    if {"model.lora.init=pissa", "task.precompute_reference=true"} & {*overrides}:
        # The base lies split in two matrices; the reference was computed in another row.
        assert float(loss.sum.detach()) == pytest.approx(4 * math.log(2), rel=1e-5)
    else:
        assert float(loss.sum.detach()) == float(torch.full((4,), 0.5).log().neg().sum())
        assert loss.logs["margin"] == loss.logs["kl"] == 0
    loss.sum.backward()
    assert any(p.grad is not None and p.grad.any() for p in built.task.model.parameters())


def test_the_reference_has_no_dropout_and_leaves_the_modes(made) -> None:
    built = made(*LORA, "model.lora.dropout=0.5", model="llama-dropout")
    built.task.train_mode()
    before = {name: module.training for name, module in built.task.named_modules()}
    trained = [name for name, p in built.task.named_parameters() if p.requires_grad]
    data = built.batch([0, 1]).data
    first, second = (built.task.reference_log_probs(data) for _ in range(2))
    assert torch.equal(first, second)
    assert before == {name: module.training for name, module in built.task.named_modules()}
    assert trained == [name for name, p in built.task.named_parameters() if p.requires_grad]
    assert any(before.values())


@pytest.mark.parametrize("overrides", [(), LORA], ids=["full", "lora"])
def test_the_reference_stays_while_the_model_moves(overrides: tuple[str, ...], made, model_of) -> None:
    built = made(*overrides)
    data = built.batch([0, 1]).data
    with torch.no_grad():
        for parameter in built.task.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    base = hf.AutoModelForCausalLM.from_pretrained(model_of(), attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([sums(base, group) for group in data["groups"]])
        moved = built.task.answer_log_probs(built.task._run(data).last_hidden_state[0], data)
    torch.testing.assert_close(built.task.reference_log_probs(data), expected, rtol=1e-5, atol=1e-4)
    assert float((moved - expected).abs().min()) > 1e-3


def test_another_model_as_the_reference(made, model_of) -> None:
    """A model of another family with the same tokenizer; one with another tokenizer is refused."""
    built = made(f"model.reference={model_of('qwen3')}")
    data = built.batch([2, 5]).data
    base = hf.AutoModelForCausalLM.from_pretrained(model_of("qwen3"), attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([sums(base, group) for group in data["groups"]])
    torch.testing.assert_close(built.task.reference_log_probs(data), expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(ModelError, match="another tokenizer"):
        made(f"model.reference={model_of('llama', 'qwen3')}")


def test_losses_without_reference_have_no_second_model(made) -> None:
    built = made("task.loss=simpo")
    assert built.task.other is None
    assert built.task.loss(built.batch([0]).data).logs["kl"] == 0


# ------------------------------------------------------------------------------------------------ loss


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("task.loss=[{name: sigmoid, weight: 0.5}, {name: hinge, weight: 2}]", "task.sft_weight=0.3"),
         lambda d, _, mean: 0.5 * np.logaddexp(0, -0.1 * d) + 2 * np.maximum(0, 1 - 0.1 * d) - 0.3 * mean[0]),
        (("task.loss=orpo", "task.beta=0.2"),
         lambda _, own, mean: 0.2 * np.logaddexp(0, -((mean[0] - np.log1p(-np.exp(mean[0])))
                                                     - (mean[1] - np.log1p(-np.exp(mean[1]))))) - mean[0]),
        (("task.loss=cpo", "task.sft_weight=0"), lambda _, own, mean: np.logaddexp(0, -0.1 * (own[0] - own[1]))),
        (("task.loss=simpo", "task.beta=2", "task.simpo_gamma=1"),
         lambda _, own, mean: np.logaddexp(0, -(2 * (mean[0] - mean[1]) - 1))),
    ],
    ids=["sum", "orpo", "cpo", "simpo"],
)  # fmt: skip
def test_the_loss_from_log_probabilities_of_each_answer_alone(overrides, expected, made, model_of) -> None:
    reference = (
        ()
        if "orpo" in overrides[0] or "cpo" in overrides[0] or "simpo" in overrides[0]
        else (f"model.reference={model_of('qwen3')}",)
    )
    built = made(*overrides, *reference)
    data = built.batch([0, 1, 6]).data
    with torch.no_grad():
        both = []
        for name in ("llama", "qwen3"):
            base = hf.AutoModelForCausalLM.from_pretrained(
                model_of(name), attn_implementation="eager", dtype=torch.float32
            )
            both.append(np.stack([sums(base, group).numpy() for group in data["groups"]], axis=1))
    own, other = both
    counts = data["counts"].reshape(-1, 2).T.numpy()
    delta = (own[0] - other[0]) - (own[1] - other[1])
    wanted = float(expected(delta, own, own / counts).sum())
    assert float(built.task.loss(data).sum.detach()) == pytest.approx(wanted, rel=1e-4)


def test_all_pairs_of_a_ranked_list(made) -> None:
    built = made(rows=RANKED)
    data = built.batch([0, 1]).data
    assert data["pairs"].tolist() == [[0, 1], [0, 2], [1, 2], [3, 4]]
    assert data["pairs_of"] == [3, 1]
    assert built.task.loss(data).count == 4


def test_statistics_of_pairs(made, model_of) -> None:
    built = made(f"model.reference={model_of('qwen3')}")
    data = built.batch([0, 1, 2]).data
    found = built.task.loss(data)
    own = built.task.answer_log_probs(built.task._run(data).last_hidden_state[0], data).detach().reshape(-1, 2)
    ratio = 0.1 * (own - built.task.reference_log_probs(data).reshape(-1, 2))
    tokens = data["counts"].reshape(-1, 2).sum(dim=1)
    expected = {
        "accuracy": (ratio[:, 0] > ratio[:, 1]).sum(), "margin": (ratio[:, 0] - ratio[:, 1]).sum(),
        "chosen_reward": ratio[:, 0].sum(), "rejected_reward": ratio[:, 1].sum(),
        "chosen_logp": own[:, 0].sum(), "rejected_logp": own[:, 1].sum(), "kl": (-10 * ratio.sum(dim=1) / tokens).sum(),
    }  # fmt: skip
    assert found.logs == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4)
    assert set(built.task.log_names) == set(found.logs)


def test_the_router_s_loss_is_weighed_by_pairs(made) -> None:
    built = made("task.loss=simpo", model="mixtral")
    built.task.train_mode()
    data = built.batch([0, 1]).data
    found = built.task.loss(data)
    out = built.task._run(data)
    assert found.logs["router"] == pytest.approx(2 * float(built.task._router_loss(out.router_logits)), rel=1e-6)


# ------------------------------------------------------------------------------------------------ precomputed


def test_fault_19_precomputed_log_probabilities_are_those_of_the_live_reference(made, tmp_path: Path) -> None:
    live, ahead = made(*LORA), made(*LORA, "task.precompute_reference=true", output="ahead")
    ahead.task.look_ahead(ahead.examples, tmp_path)
    data = live.batch(range(10)).data
    torch.testing.assert_close(
        ahead.task.reference_log_probs(data), live.task.reference_log_probs(data), rtol=1e-6, atol=1e-5
    )


def test_fault_19_another_template_or_model_is_computed_anew(
    made, tmp_path: Path, monkeypatch, model_of, tokenizer_of
) -> None:
    from luthier.modalities.llm import reference

    computed: list[int] = []
    compute = reference.compute
    monkeypatch.setattr(
        reference,
        "compute",
        lambda log_probs, groups, *more: computed.append(len(groups)) or compute(log_probs, groups, *more),
    )
    ahead = "task.precompute_reference=true"
    template = tmp_path / "template.jinja"
    template.write_text(tokenizer_of("chatml").chat_template.replace("<|im_start|>", "<|im_start|>the "))

    def look(*overrides: str, **options: Any) -> int:
        computed.clear()
        built = made(ahead, *overrides, **options)
        built.task.look_ahead(built.examples, tmp_path / "kept")
        assert built.task.other is None
        return sum(computed)

    assert look() == 10
    assert look() == 0
    assert look(rows=[*ROWS[3:], pair(11)]) == 1
    assert look(f"data.chat_template={template}") == 10
    assert look(model="qwen3") == 10
    assert look("train.precision=bf16-mixed") == 10
    assert look(*LORA) == 10  # the same model, under other names


def test_precomputed_runs_and_live_ones_are_the_same(recipe_of, left) -> None:
    options: Any = {"kind": KIND, "rows": ROWS}
    common = (
        "optim.name=sgd",
        "optim.momentum=0",
        "optim.learning_rate=0.05",
        "train.epochs=2",
        "data.batch.examples=3",
    )
    live = train(recipe_of(*common, **options, output="live")).folder
    ahead = train(recipe_of(*common, "task.precompute_reference=true", **options, output="ahead")).folder
    assert left.values(ahead) == pytest.approx(left.values(live), rel=1e-5)
    assert list((ahead / "reference").glob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ data


def test_equal_answers_are_dropped_and_counted(made) -> None:
    """Equal as given, and equal only as tokens."""
    rows = [*ROWS, {"prompt": "a", "chosen": "Rome", "rejected": "Rome"},
            {"prompt": "a", "chosen": [{"role": "assistant", "content": "Rome"}], "rejected": "Rome"}]  # fmt: skip
    report = made("data.max_bad=0.5", rows=rows).report
    assert report.dropped == {"equal_answers": 2}
    assert report.rows == 12 == report.kept_rows + 2


def test_the_prompt_is_cut_before_the_answers(made) -> None:
    """A long prompt loses its begin, the same of both; answers stay whole; an answer that is too long is not cut."""
    long = {"prompt": f"{'Rome is warm. ' * 30}What of the sum?", "chosen": "It is five.", "rejected": "It is two."}
    whole = made("data.max_length=200", rows=[long, *ROWS]).examples[0]
    short = made("data.max_length=40", rows=[long, *ROWS]).examples[0]
    assert max(len(short.group.document(at)) for at in range(2)) == 40
    assert short.group.rests[0].ids.tolist() == whole.group.rests[0].ids.tolist()
    assert short.notes["prompt tokens cut"] == max(map(len, whole.group.rests)) + len(whole.group.shared) - 40
    too_long = {"prompt": "What?", "chosen": "It is warm. " * 40, "rejected": "no"}
    report = made("data.max_length=60", "data.max_bad=0.5", rows=[too_long, *ROWS]).report
    assert report.dropped == {"too_long": 1}


def test_oldest_exchanges_go_first(made, tokenizer_of) -> None:
    said = [{"role": "system", "content": "You are helpful."}]
    for turn in range(4):
        said += [
            {"role": "user", "content": f"Add two and {turn}."},
            {"role": "assistant", "content": "The sum is five."},
        ]
    row = {"prompt": [*said, {"role": "user", "content": "What of Rome?"}], "chosen": "warm", "rejected": "cold"}
    example = made("data.max_length=60", rows=[row]).examples[0]
    text = tokenizer_of("chatml").decode(example.group.document(0).ids)
    assert example.notes["exchanges cut"] >= 1
    assert text.startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n")
    assert "Add two and 0." not in text
    assert text.rstrip().endswith("warm<|im_end|>")
    assert len(example.group.document(0)) <= 60


# ------------------------------------------------------------------------------------------------ evaluation


def test_metrics_by_slice_do_not_depend_on_the_batch(made, recipe_of, tmp_path: Path, rows_of, left) -> None:
    rows = rows_of(tmp_path / "validation.jsonl", ROWS)
    overrides = (
        f"data.validation={rows}", "evaluate.slices=[topic]", "train.epochs=4", "optim.learning_rate=3e-3",
        "evaluate.generate={max_new_tokens: 4}", "evaluate.at_start=true",
    )  # fmt: skip
    outcome = train(recipe_of(*overrides, "evaluate.batch=4", kind=KIND, rows=ROWS))
    losses = left.values(outcome.folder, "validation/loss")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] < losses[0]
    checkpoint = outcome.folder / "checkpoints" / "last"
    one, all_ = (evaluate_checkpoint(checkpoint, overrides=[f"evaluate.batch={size}"]).metrics for size in (1, 10))
    assert one["accuracy"] == all_["accuracy"] > 0.7
    assert one["loss"] == pytest.approx(all_["loss"], rel=1e-5) == pytest.approx(losses[-1], rel=1e-5)
    assert set(one["slices"]["topic"]) == {"even", "odd"}
    parts = [one["slices"]["topic"][name] for name in ("even", "odd")]
    assert sum(part["margin"] * part["pairs"] for part in parts) == pytest.approx(10 * one["margin"], rel=1e-6)
    assert one["answers"] == 10
    assert "exact_match" in one


def test_what_is_saved_loads_elsewhere(recipe_of) -> None:
    for name, overrides in (("full", ()), ("lora", LORA)):
        folder = train(recipe_of(*overrides, "train.epochs=1", kind=KIND, rows=ROWS, output=name)).folder
        model = folder / "checkpoints" / "last" / "model"
        files = {file.name for file in model.iterdir()}
        assert ("adapter_model.safetensors" if name == "lora" else "model.safetensors") in files
        assert "generation_config.json" in files
        kept = torch.load(folder / "checkpoints" / "last" / "state" / "trainer.pt", weights_only=True)
        assert not [key for key in kept["state_dict"] if key.startswith("other.")]


# ------------------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("task.loss=dpo",), "task.loss"),
        (("task.loss=exo_pair",), "label_smoothing"),
        (("task.loss=[sigmoid, bco_pair]", "task.f_divergence=forward_kl"), "bco_pair"),
        (("task.loss=simpo", "task.precompute_reference=true"), "no reference"),
        (("task.loss=[]",), "task.loss"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(overrides: tuple[str, ...], problem: str, recipe_of) -> None:
    with pytest.raises(LuthierError, match=problem):
        recipe_of(*overrides, kind=KIND, rows=ROWS)


def test_a_resolved_recipe_reads_itself_again(recipe_of) -> None:
    recipe = recipe_of("task.loss=[sigmoid, {name: bco_pair, weight: 0.5}]", kind=KIND, rows=ROWS)
    again = Config.model_validate(json.loads(json.dumps(recipe.model_dump(mode="json"))))
    assert again == recipe
