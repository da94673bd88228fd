"""What a run leaves is complete for others: model, tokenizer, chat template, terminators; and so is an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from luthier.common import attention, kinds
from luthier.common.errors import ModelError, RecipeError
from luthier.common.evaluation.run import evaluate
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.training import data
from luthier.common.training.run import train


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_a_saved_model_loads_elsewhere(family: str, recipe_of, left, task_of) -> None:
    """By transformers alone; its config does not name our attention."""
    folder = left.model(train(recipe_of("data.batch.examples=4", model=family)).folder)
    config = json.loads((folder / "config.json").read_text())
    assert attention.NAME not in json.dumps(config)
    assert not [name for name in config if "attn_implementation" in name]
    model = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("What of Rome? It is sunny and warm.").input_ids])
    with torch.no_grad():
        found = model.eval()(input_ids=ids).logits
        expected = task_of(weights=folder, model=family).task.causal(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("chatml", ["<|endoftext|>", "<|im_end|>"]),
        ("llama3", ["<|end_of_text|>", "<|eot_id|>"]),
        ("gemma", ["<eos>", "<end_of_turn>"]),
        ("phi3", ["<|endoftext|>", "<|end|>"]),
        ("mistral", ["</s>"]),
    ],
)
def test_fault_7_every_terminator_is_saved(
    family: str, ends: list[str], lora: bool, task_of, model_of, tmp_path: Path
) -> None:
    """Those that end an assistant's turn in the template beside the model's own EOS, and the template itself."""
    adapter = ("model.lora.rank=2",) if lora else ()
    made = task_of(*adapter, model=model_of("llama", family))
    folder = tmp_path / "saved"
    made.task.save_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    config = hf.GenerationConfig.from_pretrained(folder)
    assert sorted(config.eos_token_id) == sorted(tokenizer.convert_tokens_to_ids(ends))
    assert config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.chat_template == made.task.processing.tokenizer.chat_template


def test_another_chat_template_is_saved_and_its_file_not_needed_again(recipe_of, left, tokenizer_of, tmp_path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text(tokenizer_of("chatml").chat_template.replace("<|im_start|>", "<|im_start|>the "))
    validation = f"data.validation={tmp_path / 'run.jsonl'}"  # the training's rows
    recipe = recipe_of(f"data.chat_template={file}", "data.batch.examples=4", validation)
    folder = train(recipe).folder
    expected = left.values(folder, "validation/loss")[-1]
    assert hf.AutoTokenizer.from_pretrained(left.model(folder)).chat_template == file.read_text()
    file.unlink()
    assert evaluate_checkpoint(left.checkpoints(folder)[-1]).metrics["loss"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ModelError, match="no such file"):
        kinds.task("llm.sft").make_processing(recipe)


# ------------------------------------------------------------------------------------------------ evaluation


def metrics(task: Any, recipe: Any, processing: Any) -> dict[str, Any]:
    collected = data.gather(recipe, processing, "validation")
    assert collected is not None
    found: dict[str, Any] = evaluate(task, collected, recipe).metrics
    return found


SLICED = ("evaluate.slices=[topic, source]",)


def test_fault_5_metrics_do_not_depend_on_the_batch(task_of, rows_of, tmp_path: Path) -> None:
    """Batch 1 equals batch 8, overall and by slice; both equal the mean over all tokens of transformers' logits.

    In conversations and in texts, whose second token carries loss already."""
    rows = [json.loads(line) for line in rows_of(tmp_path / "validation.jsonl", 11).read_text().splitlines()]
    for at, word in enumerate(("Rome", "sunny", "five", "city", "sum")):
        rows.append({"text": f"{word} {word}{' warm' * at}.", "topic": "even" if at else "odd"})
    file = rows_of(tmp_path / "validation.jsonl", rows)
    found = []
    for batch in (1, 8):
        made = task_of(f"data.validation={file}", f"evaluate.batch={batch}", *SLICED, "task.loss.label_smoothing=0.1")
        found.append(metrics(made.task, made.recipe, made.task.processing))
    one, eight = found
    assert one["tokens"] == eight["tokens"] > 50
    for name in ("loss", "accuracy"):
        assert one[name] == pytest.approx(eight[name], rel=1e-6)
        for part in ("even", "odd"):
            assert one["slices"]["topic"][part][name] == pytest.approx(eight["slices"]["topic"][part][name], rel=1e-6)
    parts = one["slices"]["topic"]
    assert sum(part["tokens"] for part in parts.values()) == one["tokens"]
    weighted = sum(part["loss"] * part["tokens"] for part in parts.values()) / one["tokens"]
    assert weighted == pytest.approx(one["loss"], rel=1e-6)
    assert parts["even"]["loss"] != pytest.approx(parts["odd"]["loss"], rel=1e-4)
    assert "source" not in one["slices"]  # there is one only

    losses: dict[str, list[float]] = {"even": [], "odd": []}
    right = 0
    collected = data.gather(made.recipe, made.task.processing, "validation")
    for example in collected.examples:
        ids, trained = example.documents[0].ids, example.documents[0].trained
        with torch.no_grad():
            logits = made.task.causal(input_ids=torch.tensor(ids[None].astype("int64"))).logits[0, :-1]
        wanted = torch.tensor(ids[1:].astype("int64"))
        asked = torch.tensor(trained[1:])
        found = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")[asked]
        losses[example.fields["topic"]] += found.tolist()
        right += int((logits.argmax(1) == wanted)[asked].sum())
    for topic, part in losses.items():
        assert parts[topic]["tokens"] == len(part)
        assert parts[topic]["loss"] == pytest.approx(sum(part) / len(part), rel=1e-5)
    assert one["accuracy"] == pytest.approx(right / one["tokens"])


@pytest.mark.parametrize(
    "overrides", [(), ("model.lora.rank=2", "model.new_tokens=['<|note|>']")], ids=["whole", "lora"]
)
def test_a_checkpoint_alone_gives_the_same_metrics(overrides, recipe_of, rows_of, left, tmp_path: Path) -> None:
    file = rows_of(tmp_path / "validation.jsonl", 7)
    recipe = recipe_of(
        f"data.validation={file}", *SLICED, *overrides, "data.batch.examples=3", "task.neftune_alpha=5",
        "task.loss.z_weight=0.1",
    )  # fmt: skip
    folder = train(recipe).folder
    written = json.loads((left.checkpoints(folder)[-1] / "metrics.json").read_text())
    for batch in (2, 8):
        found = evaluate_checkpoint(left.checkpoints(folder)[-1], overrides=[f"evaluate.batch={batch}"]).metrics
        for name in ("loss", "accuracy", "tokens"):
            assert found[name] == pytest.approx(written[name], rel=1e-6)
        assert found["slices"]["topic"]["odd"]["loss"] == pytest.approx(
            written["slices"]["topic"]["odd"]["loss"], rel=1e-6
        )


def test_fault_25_an_evaluation_holds_few_logits_at_once(task_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows with loss are projected, 64 at a time here, and nothing of them is kept but sums."""
    from luthier.common import losses

    made = task_of(rows=12)
    batch = made.batch(range(12))
    made.task.eval()
    rows: list[int] = []
    made.task.causal.lm_head.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[0]))
    whole = made.task.predict(batch)
    monkeypatch.setitem(losses.CHUNK, "cpu", 1)
    asked = int((batch.data["targets"] != -100).sum())
    assert rows == [asked]
    rows.clear()
    parts = made.task.predict(batch)
    assert rows == [64] * (asked // 64) + [asked % 64]
    assert float(parts.loss.sum) == pytest.approx(float(whole.loss.sum), rel=1e-6)
    assert [one.count for one in parts.records] == [one.count for one in whole.records]
    assert all(isinstance(value, int | float) for one in parts.records for value in (one.loss, one.right, one.count))


# ------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("data.max_lenght=9", "'max_length' perhaps"),
        ("data.max_seq_length=9", "'max_length' perhaps"),
        ("data.batch.pack=true", "'packing' perhaps"),
        ("task.neftune_noise_alpha=5", "'neftune_alpha' perhaps"),
        ("task.loss.smoothing=0.1", "'label_smoothing' perhaps"),
        ("model.quantisation=nf4", "'quantization' perhaps"),
        ("data.too_long.prompts=left", "'prompt' perhaps"),
    ],
)
def test_fault_26_an_unknown_key_is_refused_with_the_nearest_one(given: str, near: str, recipe_of) -> None:
    """Also the names that other toolkits have for an option (fault 27: nothing has been renamed here yet)."""
    with pytest.raises(RecipeError) as error:
        recipe_of(given)
    assert "unknown key" in str(error.value)
    assert near in str(error.value)
