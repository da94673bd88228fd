"""Training a saved adapter further: what is loaded and saved, and the reference, a frozen copy of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from luthier.common.checkpoint import directory
from luthier.common.errors import LuthierError, ModelError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training.run import train

PAIRS = [
    {"prompt": f"What of {number}?", "chosen": f"It is {'two ' * (number % 4)}five.", "rejected": "It is not."}
    for number in range(10)
]
NEW = ("model.new_tokens=['<|note|>']", "data.control_tokens=token")
NOTES = [
    {"messages": [{"role": "user", "content": "Add two."}, {"role": "assistant", "content": f"five <|note|> {word}"}]}
    for word in ("Rome", "sunny", "warm", "five")
]


@pytest.fixture
def adapter_of(recipe_of, left):
    """The folder of an adapter that a short fine-tuning leaves; none of its numbers is 0."""

    def make(*overrides: str, model: str = "llama", **options: Any) -> Path:
        common = ("model.lora.rank=2", "model.lora.target_modules=all-linear", "train.epochs=2")
        folder: Path = left.model(train(recipe_of(*common, *overrides, model=model, output="sft", **options)).folder)
        return folder

    return make


def pairs(adapter: Path, *overrides: str, rows: Any = PAIRS, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return (f"model.adapter={adapter}", *overrides), {"kind": "llm.dpo", "rows": rows, **options}


def elsewhere(base: Path, adapter: Path) -> Any:
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, str(adapter)).eval()


def answers(model: Any, data: dict[str, Any]) -> torch.Tensor:
    """[A] log-probability of each answer alone."""
    found = []
    for group in data["groups"]:
        for number in range(len(group.rests)):
            one = group.document(number)
            ids = torch.from_numpy(one.ids).long()
            with torch.no_grad():
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(dim=-1)
            found.append(logits.gather(1, ids[1:, None])[:, 0][torch.from_numpy(one.trained[1:])].sum())
    return torch.stack(found)


# ------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("model", ["llama", "llama-dropout"])
def test_at_the_start_the_loss_is_ln_2(model: str, adapter_of, task_of) -> None:
    """Exactly, though the adapter is not the base; the reference has no dropout, whatever the policy has."""
    overrides, options = pairs(adapter_of(model=model), model=model)
    made = task_of(*overrides, **options)
    data = made.batch([0, 3, 4, 7]).data
    made.task.eval()
    loss = made.task.loss(data)
    assert float(loss.sum.detach()) == float(torch.full((4,), 0.5).log().neg().sum())
    assert loss.logs["margin"] == loss.logs["kl"] == 0
    made.task.train_mode()
    first = made.task.reference_log_probs(data)
    assert torch.equal(first, made.task.reference_log_probs(data))
    trained = {name for name, one in made.task.named_parameters() if one.requires_grad}
    made.task.loss(data).sum.backward()
    assert trained == {name for name, one in made.task.named_parameters() if one.grad is not None}
    assert trained
    assert all(".default." in name for name in trained)


def test_the_reference_is_the_first_adapter_on_the_same_base(adapter_of, task_of, model_of) -> None:
    """It stays while the policy moves; the base is in memory once."""
    adapter = adapter_of()
    overrides, options = pairs(adapter)
    made = task_of(*overrides, **options)
    assert made.task.other is None
    data = made.batch([0, 1]).data
    with torch.no_grad():
        for parameter in made.task.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        moved = made.task.answer_log_probs(made.task._run(data).last_hidden_state[0], data)
    expected = answers(elsewhere(model_of(), adapter), data)
    torch.testing.assert_close(made.task.reference_log_probs(data), expected, rtol=1e-5, atol=1e-4)
    assert float((moved - expected).abs().min()) > 1e-3
    base = answers(hf.AutoModelForCausalLM.from_pretrained(model_of(), dtype=torch.float32), data)
    assert float((base - expected).abs().min()) > 1e-3
    again = made.task.answer_log_probs(made.task._run(data).last_hidden_state[0], data).detach()
    assert torch.equal(again, moved), "the policy is active again"


def test_fault_19_precomputed_it_is_the_live_one_and_is_dropped(adapter_of, task_of, tmp_path: Path) -> None:
    overrides, options = pairs(adapter_of())
    live = task_of(*overrides, **options)
    ahead = task_of(*overrides, "task.precompute_reference=true", **options, output="ahead")
    ahead.task.look_ahead(ahead.examples, tmp_path)
    assert set(ahead.task.model.peft_config) == {"default"}
    assert not [name for name, _ in ahead.task.named_parameters() if ".reference." in name]
    data = live.batch(range(10)).data
    torch.testing.assert_close(
        ahead.task.reference_log_probs(data), live.task.reference_log_probs(data), rtol=1e-6, atol=1e-5
    )
    assert all(".default." in name for name, one in ahead.task.named_parameters() if one.requires_grad)


# ------------------------------------------------------------------------------------------------ training


def test_a_resumed_run_is_the_same_and_keeps_its_reference(adapter_of, recipe_of, left, tmp_path: Path) -> None:
    """Bit for bit; the reference is neither saved with the policy nor taken from it."""
    adapter = adapter_of()
    overrides, options = pairs(adapter, "checkpoint.every=1", "data.batch.examples=3", "train.epochs=2")
    whole = train(recipe_of(*overrides, **options)).folder
    steps = left.steps(whole)
    folder = tmp_path / "stopped"
    shutil.copytree(whole, folder, symlinks=True)
    for checkpoint in directory.committed(folder / "checkpoints"):
        if directory.step_of(checkpoint) > steps[2]:
            shutil.rmtree(checkpoint)
    train(recipe_of(*overrides, **options).model_copy(update={"output": str(folder)}))
    assert left.curve(folder) == left.curve(whole)
    expected, found = left.weights(whole), left.weights(folder)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert load_file(adapter / "adapter_model.safetensors").keys() == expected.keys()
    assert {file.name for file in left.model(whole).iterdir() if file.is_dir()} == set()
    state = torch.load(left.checkpoints(whole)[-1] / "state" / "trainer.pt", weights_only=True)["state_dict"]
    assert state
    assert all(".default." in name for name in state)


def test_evaluated_alone_it_is_measured_against_the_first_adapter(adapter_of, recipe_of, rows_of, left, tmp_path):
    rows = rows_of(tmp_path / "validation.jsonl", PAIRS)
    overrides, options = pairs(
        adapter_of(), f"data.validation={rows}", "evaluate.at_start=true", "train.epochs=4", "optim.learning_rate=3e-3"
    )
    folder = train(recipe_of(*overrides, **options)).folder
    losses = left.values(folder, "validation/loss")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] < 0.95 * losses[0]
    metrics = evaluate_checkpoint(folder / "checkpoints" / "last").metrics
    assert metrics["loss"] == pytest.approx(losses[-1], rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_fault_20_what_is_saved_merges_to_the_policy(family: str, adapter_of, recipe_of, task_of, left, model_of):
    """The adapter with new tokens, trained further by preferences: merged, its logits are the policy's."""
    adapter = adapter_of(*NEW, model=family, rows=NOTES)
    rows = [{"prompt": "Add two.", "chosen": f"five <|note|> {word}", "rejected": "It is not."} for word in ("a", "b")]
    overrides, options = pairs(adapter, "data.control_tokens=token", "train.epochs=3", model=family, rows=rows)
    folder = left.model(train(recipe_of(*overrides, **options)).folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(model_of(family), dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    merged = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload().eval()
    policy = task_of(*overrides, **options, weights=folder).task.causal.eval()
    first = task_of(*overrides, **options).task.causal.eval()
    ids = torch.tensor([tokenizer("What of <|note|> Rome?").input_ids])
    with torch.no_grad():
        found, expected, before = (one(input_ids=ids, use_cache=False).logits for one in (merged, policy, first))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert float((expected - before).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["llm.sft", "llm.kto"])
def test_other_kinds_train_it_further_too(kind: str, adapter_of, recipe_of, left) -> None:
    adapter = adapter_of()
    rows = [{"prompt": one["prompt"], "completion": one["chosen"], "label": True} for one in PAIRS]
    folder = train(recipe_of(f"model.adapter={adapter}", "train.epochs=1", kind=kind, rows=rows)).folder
    before, after = load_file(adapter / "adapter_model.safetensors"), left.weights(folder)
    assert before.keys() == after.keys()
    assert all(float((after[name] - before[name]).abs().max()) > 0 for name in after if "lora_B" in name)


# ------------------------------------------------------------------------------------------------ refusals


def test_an_adapter_in_the_place_of_a_model_is_named(adapter_of, task_of, model_of) -> None:
    adapter = adapter_of()
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    with pytest.raises(ModelError, match="an adapter and not a model") as error:
        task_of(model=adapter)
    assert f"model.path={base} model.adapter={adapter}" in str(error.value)
    with pytest.raises(ModelError, match=r"model\.adapter: the adapter can't be loaded"):
        task_of(f"model.adapter={model_of()}")


@pytest.mark.parametrize("override", ["model.lora.rank=2", "model.new_tokens=['<|x|>']"])
def test_a_saved_adapter_stays_as_it_is(override: str, recipe_of) -> None:
    with pytest.raises(LuthierError, match="without lora and new_tokens"):
        recipe_of("model.adapter=somewhere", override)
