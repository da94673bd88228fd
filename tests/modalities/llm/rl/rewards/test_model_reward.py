"""A trained reward model as a reward: its scores are transformers' own, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from peft import PeftModel

from luthier.common.errors import LuthierError
from luthier.common.training.run import train
from luthier.modalities.llm.rl.rewards.answer import Answer
from luthier.modalities.llm.rl.rewards.config import Model
from luthier.modalities.llm.rl.rewards.rewards import Rewards

ROWS = [
    {"prompt": f"What of {number}?", "chosen": f"It is {'two ' * (number % 4)}five.", "rejected": "It is not."}
    for number in range(6)
]
LORA = ("model.lora.target_modules=[q_proj, v_proj]", "model.lora.rank=2")
ANSWERS = [
    Answer(prompt, said, 3, True)
    for prompt in ([{"role": "user", "content": "What of 1?"}], "What of two and three?")
    for said in ("It is five.", "It is not.", "Rome is sunny and warm today.")
]


def theirs(model: Any, tokenizer: Any) -> list[list[float]]:
    """transformers' scores of each answer alone, rendered by the model's chat template."""
    found = []
    for one in ANSWERS:
        asked = [{"role": "user", "content": one.prompt}] if isinstance(one.prompt, str) else list(one.prompt)
        messages = [*asked, {"role": "assistant", "content": one.completion}]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            found.append(model.score(hidden[0, -1]).tolist())
    return found


def own(path: Path, **options: Any) -> np.ndarray:
    found = Rewards([Model(path=str(path), **options)]).score(ANSWERS)
    assert not found.errors
    return found.total


@pytest.mark.parametrize("overrides", [(), LORA])
def test_the_scores_are_transformers_own(recipe_of, overrides: tuple[str, ...]) -> None:
    recipe = recipe_of("train.epochs=1", *overrides, kind="llm.reward", rows=ROWS)
    train(recipe)
    folder = Path(recipe.output) / "checkpoints" / "last"
    place = recipe.model.path if overrides else folder / "model"
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(
        place, num_labels=1, attn_implementation="eager", dtype=torch.float32
    )
    if overrides:
        model = PeftModel.from_pretrained(model, str(folder / "model")).base_model.model
    model.eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "model")
    expected = [one[0] for one in theirs(model, tokenizer)]
    assert np.std(expected) > 1e-3
    np.testing.assert_allclose(own(folder), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own(folder, tokens=20), expected, rtol=1e-4, atol=1e-5)
    if not overrides:
        np.testing.assert_allclose(own(folder / "model"), expected, rtol=1e-4, atol=1e-5)


def test_of_a_model_with_classes_the_log_probability_counts(model_of, tmp_path: Path) -> None:
    config = hf.AutoConfig.from_pretrained(model_of("llama"))
    config.id2label, config.label2id = {0: "bad", 1: "good"}, {"bad": 0, "good": 1}
    torch.manual_seed(1)
    model = hf.AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(model_of("llama"))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    logits = torch.tensor(theirs(model, tokenizer))
    expected = logits.log_softmax(dim=1)[:, 1].numpy()
    np.testing.assert_allclose(own(tmp_path, class_name="good"), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(LuthierError, match="one of bad, good"):
        own(tmp_path, class_name="better")


def test_an_answer_that_the_model_can_t_read_is_told(model_of, recipe_of) -> None:
    recipe = recipe_of("train.steps=1", "train.epochs=null", "data.max_length=40", kind="llm.reward", rows=ROWS)
    train(recipe)
    rewards = Rewards([Model(path=str(Path(recipe.output) / "checkpoints" / "last"))])
    answers = [ANSWERS[0], Answer("q", "", 0, True), Answer("q", "word " * 60, 60, True)]
    found = rewards.score(answers)
    assert np.isfinite(found.total).tolist() == [True, False, False]
    assert ["empty" in found.errors[0].reason, "longer than the limit" in found.errors[1].reason] == [True, True]


def test_what_is_no_reward_model_is_refused(model_of, recipe_of, tmp_path: Path) -> None:
    recipe = recipe_of("train.steps=1", "train.epochs=null")
    train(recipe)
    with pytest.raises(LuthierError, match="not a reward model"):
        Rewards([Model(path=str(Path(recipe.output) / "checkpoints" / "last"))])
    with pytest.raises(LuthierError):
        Rewards([Model(path=str(tmp_path / "none"))])
