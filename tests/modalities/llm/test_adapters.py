"""Adapters, new tokens and tied tables: what is trained, what is saved, and that others load it as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

from luthier.common.errors import ModelError
from luthier.common.training.run import train

ALL = ("model.lora.target_modules=all-linear", "model.lora.rank=2")
NEW = "model.new_tokens=['<|note|>', '<|end_of_note|>']"
NOTES = [
    {"messages": [{"role": "user", "content": "Add two."}, {"role": "assistant", "content": "five Rome"}]},
    {"messages": [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "sunny <|note|> warm"}]},
    {"messages": [{"role": "user", "content": "Add three."}, {"role": "assistant", "content": "<|end_of_note|> six"}]},
] * 2
TOKENS = (NEW, "data.control_tokens=token")


@pytest.fixture
def trained(recipe_of, left) -> Callable[..., Path]:
    """The model folder that a short training leaves."""

    def make(*overrides: str, **options: Any) -> Path:
        outcome = train(recipe_of("data.batch.examples=4", "train.epochs=2", *overrides, **options))
        folder: Path = left.model(outcome.folder)
        return folder

    return make


def probe(tokenizer: Any) -> Tensor:
    return torch.tensor([tokenizer("What of <|note|> Rome? <|end_of_note|> sunny").input_ids])


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=ids).logits
    return found


def elsewhere(folder: Path, base: Path) -> tuple[Any, Any]:
    """(model, tokenizer) as somebody else loads an adapter: by transformers and PEFT alone."""
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    return peft.PeftModel.from_pretrained(model, str(folder)), tokenizer


def same_as_task(folder: Path, loaded: Any, ids: Tensor, task_of: Any, *overrides: str, **options: Any) -> None:
    made = task_of(*overrides, weights=folder, **options)
    expected = logits(made.task.causal, ids)
    torch.testing.assert_close(logits(loaded, ids), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ adapters


def test_fault_23_every_adapter_moves_under_activation_checkpointing(recipe_of, left) -> None:
    """With non-reentrant checkpointing the frozen embeddings don't cut the gradient off; the base stays as it was."""
    recipe = recipe_of(
        "train.gradient_checkpointing=true", "model.lora.rank=2", "data.batch.examples=4", "train.epochs=1",
        "model.lora.target_modules=[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head]",
    )  # fmt: skip
    found = left.weights(train(recipe).folder)
    moved = [name for name in found if "lora_B" in name]
    assert len(moved) == 2 * 7 + 1
    for name in moved:
        assert float(found[name].abs().max()) > 1e-4, name


def test_the_base_stays_as_it_was(recipe_of, model_of) -> None:
    from lightning.pytorch import Callback

    class Ended(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.state = {name: value.clone() for name, value in pl_module.causal.state_dict().items()}

    ended = Ended()
    train(recipe_of(*ALL, "data.batch.examples=4"), [ended])
    base = load_file(model_of() / "model.safetensors")
    left = {name.replace(".base_layer", ""): value for name, value in ended.state.items() if "lora" not in name}
    assert left.keys() == base.keys()
    for name in base:
        assert torch.equal(left[name], base[name]), name
    assert any(float(value.abs().max()) > 1e-4 for name, value in ended.state.items() if "lora_B" in name)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2"])
def test_loss_and_gradients_of_an_adapter_on_the_head(family: str, task_of, model_of) -> None:
    """Adapters on all layers and on the output layer, tied or capped: as PEFT's own model gives with labels."""
    target = "model.lora.target_modules=[q_proj, o_proj, down_proj, lm_head]"
    made = task_of(target, "model.lora.init=gaussian", "model.lora.rank=2", model=family)
    with torch.no_grad():
        for name, parameter in made.task.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    batch = made.batch([2])
    loss = made.task.loss(batch.data)
    loss.sum.backward()
    section = {"r": 2, "lora_alpha": 32, "target_modules": ["q_proj", "o_proj", "down_proj", "lm_head"]}
    base = hf.AutoModelForCausalLM.from_pretrained(model_of(family), attn_implementation="eager", dtype=torch.float32)
    theirs = peft.get_peft_model(base, peft.LoraConfig(**section))
    theirs.load_state_dict(made.task.model.state_dict())
    labels = torch.cat([torch.tensor([-100]), batch.data["targets"][:-1]])[None]
    expected = theirs(input_ids=batch.data["input_ids"][None], labels=labels, num_items_in_batch=1).loss
    expected.backward()
    assert float(loss.sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    ours = {name: p.grad for name, p in made.task.model.named_parameters() if p.requires_grad}
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert ours.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert float((ours[name] - gradient).abs().max()) <= 1e-5 * largest, name


def test_fault_21_an_adapter_s_checkpoint_holds_the_adapter_and_no_more(trained, model_of) -> None:
    """Its key set, by rank and layers; the base is in neither part of the checkpoint."""
    folder = trained(*ALL)
    keys = {name.replace("base_model.model.", "") for name in load_file(folder / "adapter_model.safetensors")}
    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layers += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    expected = {f"model.layers.{at}.{one}.lora_{side}.weight" for at in range(2) for one in layers for side in "AB"}
    assert keys == expected
    state = torch.load(folder.parent / "state" / "trainer.pt", weights_only=True)["state_dict"]
    assert len(state) == len(expected)
    assert all("lora_" in name for name in state)
    size = sum(file.stat().st_size for file in (folder.parent / "state").iterdir())
    assert size < 4 * (folder / "adapter_model.safetensors").stat().st_size + 50_000


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize(
    "overrides", [ALL, (*ALL, "model.lora.dora=true", "model.lora.rslora=true")], ids=["lora", "dora"]
)
def test_an_adapter_loads_elsewhere(family: str, overrides: tuple[str, ...], trained, model_of, task_of) -> None:
    folder = trained(*overrides, model=family)
    model, tokenizer = elsewhere(folder, model_of(family))
    ids = probe(tokenizer)
    same_as_task(folder, model, ids, task_of, *overrides, model=family)
    base = hf.AutoModelForCausalLM.from_pretrained(model_of(family), dtype=torch.float32)
    assert float((logits(model, ids) - logits(base, ids)).abs().max()) > 0.01


# ------------------------------------------------------------------------------------------------ new tokens


@pytest.mark.parametrize("rows", [0, 450], ids=["grown", "room"])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_new_tokens_begin_as_the_mean_of_what_spelled_them(family: str, rows: int, task_of, model_of) -> None:
    """In both tables; also where the model has more rows than the tokenizer had tokens."""
    base = model_of(family, "chatml", rows)
    made = task_of(*TOKENS, model=base, rows=NOTES)
    before = load_file(base / "model.safetensors")
    tokenizer = hf.AutoTokenizer.from_pretrained(base)
    new = made.task.processing.tokenizer.convert_tokens_to_ids(["<|note|>", "<|end_of_note|>"])
    assert new == [len(tokenizer), len(tokenizer) + 1]
    spelled = {at: tokenizer(text).input_ids for at, text in zip(new, ("<|note|>", "<|end_of_note|>"), strict=True)}
    causal = made.task.causal
    tables = {"model.embed_tokens.weight": causal.get_input_embeddings().weight}
    if family == "llama":
        tables["lm_head.weight"] = causal.get_output_embeddings().weight
    else:
        assert causal.get_output_embeddings().weight is causal.get_input_embeddings().weight
    for name, table in tables.items():
        assert len(table) == (rows or len(tokenizer) + 2)
        for at, pieces in spelled.items():
            assert len(pieces) > 2
            torch.testing.assert_close(table[at].detach(), before[name][pieces].mean(dim=0))
        assert torch.equal(table[: len(tokenizer)].detach(), before[name][: len(tokenizer)])
    assert causal.config.vocab_size == (rows or len(tokenizer) + 2)


@pytest.mark.parametrize("rows", [0, 450], ids=["grown", "room"])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_new_tokens_of_a_whole_model_are_saved(family: str, rows: int, trained, model_of, task_of) -> None:
    base = model_of(family, "chatml", rows)
    folder = trained(*TOKENS, model=base, rows=NOTES)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    new = tokenizer.convert_tokens_to_ids(["<|note|>", "<|end_of_note|>"])
    assert tokenizer("sunny <|note|>").input_ids[-1] == new[0]
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == (rows or len(tokenizer))
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    assert len(tables) == (1 if family == "llama-tied" else 2)
    ids = probe(tokenizer)
    assert set(new) <= set(ids[0].tolist())
    same_as_task(folder, model, ids, task_of, *TOKENS, model=base, rows=NOTES)
    fresh = task_of(*TOKENS, model=base, rows=NOTES).task.causal
    assert (
        float((model.get_input_embeddings().weight[new] - fresh.get_input_embeddings().weight[new]).abs().max()) > 1e-3
    )


@pytest.mark.parametrize("rows", [0, 450], ids=["grown", "room"])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_under_an_adapter_only_the_new_rows_of_the_tables_are_trained(
    family: str, rows: int, trained, model_of, task_of
) -> None:
    """Input and output rows; the adapter holds these rows and not the tables."""
    base = model_of(family, "chatml", rows)
    options: dict[str, Any] = {"model": base, "rows": NOTES}
    folder = trained(*ALL, *TOKENS, **options)
    saved = load_file(folder / "adapter_model.safetensors")
    deltas = {name: value for name, value in saved.items() if "trainable_tokens_delta" in name}
    assert len(deltas) == (1 if family == "llama-tied" else 2)
    assert all(value.shape == (2, 32) for value in deltas.values())
    assert not [name for name in saved if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    fresh = task_of(*ALL, *TOKENS, **options)
    begin = {name: value for name, value in fresh.task.model.named_parameters() if "trainable_tokens_delta" in name}
    for (name, value), (_, first) in zip(sorted(deltas.items()), sorted(begin.items()), strict=True):
        assert float((value - first).abs().max(dim=1).values.min()) > 1e-3, name

    model, tokenizer = elsewhere(folder, base)
    ids = probe(tokenizer)
    assert len(tokenizer) - 2 in ids[0].tolist()
    same_as_task(folder, model, ids, task_of, *ALL, *TOKENS, **options)


def test_tables_that_are_trained_whole_beside_an_adapter(trained, model_of, task_of) -> None:
    """`modules_to_save` has its own copy of both tables, new rows and old ones."""
    overrides = (*ALL, *TOKENS, "model.lora.modules_to_save=[embed_tokens, lm_head]")
    folder = trained(*overrides, rows=NOTES)
    saved = load_file(folder / "adapter_model.safetensors")
    whole = {name: value for name, value in saved.items() if "lora" not in name}
    assert {name.rpartition("model.")[2] for name in whole} == {"embed_tokens.weight", "lm_head.weight"}
    model, tokenizer = elsewhere(folder, model_of())
    assert all(len(value) == len(tokenizer) for value in whole.values())
    same_as_task(folder, model, probe(tokenizer), task_of, *overrides, rows=NOTES)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_loss_and_gradients_with_new_rows(family: str, task_of, model_of) -> None:
    """The fused loss with rows put into the table, against PEFT's own model on whole logits."""
    made = task_of(*ALL, *TOKENS, model=family, rows=NOTES)
    assert made.task._head.weight() is not None
    data = made.batch([1]).data
    loss = made.task.loss(data)
    loss.sum.backward()
    ours = {name: p.grad.clone() for name, p in made.task.named_parameters() if p.requires_grad}
    made.task.zero_grad()
    labels = torch.cat([torch.tensor([-100]), data["targets"][:-1]])[None]
    expected = made.task.model(input_ids=data["input_ids"][None], labels=labels, num_items_in_batch=1).loss
    expected.backward()
    assert float(loss.sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    for name, parameter in made.task.named_parameters():
        if parameter.requires_grad:
            assert float((ours[name] - parameter.grad).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize("rows", [0, 450], ids=["grown", "room"])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_fault_20_merging_keeps_the_logits(family: str, rows: int, trained, model_of, tmp_path: Path) -> None:
    """An adapter with new tokens, on tied and untied tables: merged by PEFT, saved, loaded again."""
    base = model_of(family, "chatml", rows)
    folder = trained(*ALL, *TOKENS, model=base, rows=NOTES)
    model, tokenizer = elsewhere(folder, base)
    ids = probe(tokenizer)
    expected = logits(model, ids)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(again, ids), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ refusals


def test_new_tokens_that_are_not_new(task_of) -> None:
    with pytest.raises(ModelError, match="has these tokens already") as error:
        task_of("model.new_tokens=['<|im_end|>', '<|x|>']")
    assert "<|im_end|>" in str(error.value)


@pytest.mark.parametrize("target", ["[q_proj, lm_head]", "'.*(q_proj|lm_head)'"])
def test_new_tokens_beside_an_adapter_on_the_output_layer(target: str, task_of) -> None:
    with pytest.raises(ModelError, match="can't be trained in this output layer"):
        task_of(NEW, f"model.lora.target_modules={target}", "model.lora.rank=2", rows=NOTES)


def test_layers_that_the_model_has_not(task_of) -> None:
    with pytest.raises(ModelError) as error:
        task_of("model.lora.target_modules=[c_attn]")
    assert "model.lora.target_modules" in str(error.value)
