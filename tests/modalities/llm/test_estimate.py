"""`luthier estimate` of a language model of which only the configuration is there, beside numbers derived by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from luthier.common.estimate import estimate

WIDTH, LAYERS, INNER, HEADS, VOCABULARY = 4096, 2, 11008, 32, 32000
LINEAR = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
WHOLE = LINEAR + 2 * VOCABULARY * WIDTH + (2 * LAYERS + 1) * WIDTH


@pytest.fixture(scope="module")
def wide(tokenizer_of, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The widths of Llama 2 7B and two of its layers, without weights."""
    folder = tmp_path_factory.mktemp("wide")
    config = hf.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, intermediate_size=INNER, num_attention_heads=HEADS,
        vocab_size=VOCABULARY, max_position_embeddings=4096, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    tokenizer_of("chatml").save_pretrained(folder)
    return folder


def test_a_model_is_counted_without_its_weights(wide, recipe_of, tmp_path: Path) -> None:
    file = tmp_path / "estimate.json"
    recipe = recipe_of(model=wide, rows=8)
    found = estimate(recipe, devices=8, device="h100", room=8, price=2.0, tries=3, file=file)
    assert found["model"]["parameters"] == found["model"]["trained"] == WHOLE
    own, cut = found["memory"]["auto"], found["memory"]["fsdp2"]
    assert own["gradients"] == 4 * WHOLE
    frequencies = WIDTH // HEADS // 2
    assert own["weights"] == 4 * (WHOLE + 2 * frequencies), "with the rotary frequencies, which are kept twice"
    assert own["optimizer"] == 8 * WHOLE
    assert cut["weights"] == own["weights"] // 8
    assert own["fits"] is None, "16 bytes for each parameter are more than 8 GB"
    assert cut["fits"] == "as it is"
    assert found["checkpoints"]["model"] == 4 * WHOLE
    assert found["time"]["price_with_tries"] == pytest.approx(3 * 2.0 * 8 * found["time"]["seconds"] / 3600)
    assert json.loads(file.read_text())["model"] == found["model"]


def test_operations_are_those_of_the_layers_attention_and_the_places_with_loss(wide, task_of: Any) -> None:
    from luthier.common.check.subject import Subject, largest
    from luthier.common.estimate.step import dry_step
    from luthier.common.training import data

    made = task_of(rows=8)  # the same rows; their batch, from a small model with the same tokenizer
    recipe = made.recipe.model_copy(update={"model": made.recipe.model.model_copy(update={"path": str(wide)})})
    subject = Subject(recipe, type(made.task), made.task.processing)
    subject.sets["train"] = data.gather(recipe, made.task.processing, "train")
    subject.plan = data.plan(recipe, subject.given, subject.processing, 1, 1)
    step = dry_step(subject)
    batch = made.batch(largest(subject.plan).indices)
    tokens = len(batch.data["input_ids"])
    asked = int((batch.data["targets"] != -100).sum())
    sizes = batch.data["bounds"].diff().tolist()
    attention = sum(4 * size * size * WIDTH for size in sizes) * LAYERS
    # The output layer's gradients are computed along with its loss: by hidden states and by weights.
    output = 3 * 2 * asked * WIDTH * VOCABULARY
    assert step.forward == 2 * tokens * LINEAR + attention + output
    # Twice the layers' products; attention's five products in the place of two.
    assert step.backward == 4 * tokens * LINEAR + attention * 5 // 2
