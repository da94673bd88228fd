"""The engine on servers, of a training in several processes: one gives the weights, all draw with them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from luthier.common.training.run import train
from luthier.modalities.llm.rl.engines.engine import Completion, Sampling
from luthier.modalities.llm.rl.engines.http import HttpEngine, HttpSection

PROMPT, SEEDS = np.array([300, 20, 9, 40], np.int32), list(range(8))
SAMPLING = Sampling(max_new_tokens=6, stops=(-1,))
ROWS = [{"prompt": f"What of {word}?"} for word in ("weather", "Rome", "sunny", "warm", "city", "name", "sum", "five")]
LETTERS = """
def letters(answers):
    return [answer.completion.lower().count("e") / (1 + answer.tokens) for answer in answers]
"""


class Saved:
    def __init__(self, model: Any):
        self.model = model

    def save_pretrained(self, directory: Path) -> None:
        self.model.save_pretrained(directory)


def model(base: Path, changed: float, is_adapter: bool = False) -> Any:
    torch.manual_seed(7)
    found: Any = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if is_adapter:
        config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        found = get_peft_model(found, config).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter += changed * torch.randn_like(parameter)
    return found


def check(found: Any, made: list[list[Completion]], version: int) -> None:
    """All are of the version, with the model's log-probabilities."""
    (drawn,) = made
    assert len(drawn) == len(SEEDS)
    for one in drawn:
        assert one.version == version
        ids = torch.from_numpy(np.concatenate([PROMPT, one.tokens]).astype(np.int64))
        with torch.no_grad():
            logits = found(input_ids=ids[None]).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[len(PROMPT) :, None])[:, 0]
        np.testing.assert_allclose(one.log_probs, expected.numpy(), rtol=1e-4, atol=1e-5)


def together(*engines: HttpEngine) -> list[list[list[Completion]]]:
    """What engines draw at the same time."""
    made: list[Any] = [None] * len(engines)

    def draw(at: int) -> None:
        made[at] = engines[at].generate([PROMPT], SAMPLING, [SEEDS])

    threads = [threading.Thread(target=draw, args=(at,)) for at in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_what_one_process_has_given_all_draw_with(
    server: str, is_adapter: bool, serve, model_of, tmp_path: Path
) -> None:
    """Also when the server is started again, which each of them notices; and with the weights that come next."""
    base = model_of("llama")
    place = serve(server, str(base))
    section = HttpSection(server=server, urls=(place.url,), timeout=60, patience=60, workers=4)  # type: ignore[arg-type]
    first, second = (HttpEngine(section, tmp_path / "weights") for _ in range(2))
    for version, change in ((1, 0.0), (2, 0.3)):
        trained = model(base, change, is_adapter)
        second.take(first.give(version, Saved(trained)))
        for made in together(first, second):
            check(trained, made, version)
        place.kill()
        place.start()
        for _ in range(2):
            for made in together(first, second):
                check(trained, made, version)
    assert len(list((tmp_path / "weights").iterdir())) == 1
    place.kill()


@pytest.mark.slow
def test_two_processes_train_as_one(recipe_of, serve, model_of, launch, left, tmp_path: Path) -> None:
    """Each asks for the completions of its own prompts; the server's log-probabilities are the trainer's own."""
    (tmp_path / "letters.py").write_text(LETTERS)
    place = serve("vllm", str(model_of("llama")), "--logprobs-mode", "processed_logprobs")
    common = (
        "data.max_length=60", "rollout.max_new_tokens=5", "rollout.num_generations=3", "data.batch.examples=2",
        "train.epochs=null", "train.steps=3", "rollout.temperature=0.8", "evaluate.every=2", "evaluate.at_start=false",
        f"rewards=[{{kind: function, function: '{tmp_path}/letters.py:letters'}}]", "rollout.correction=token",
        f"rollout.engine={{urls: ['{place.url}'], patience: 60, workers: 4}}", "optim.name=sgd",
        "optim.learning_rate=0.5", "optim.momentum=0", f"data.validation={tmp_path}/one.jsonl",
    )  # fmt: skip
    made = {"rows": ROWS, "kind": "llm.grpo"}
    one = recipe_of(*common, "train.accumulate=2", output="one", **made)
    two = recipe_of(*common, "train.devices=2", "train.strategy=ddp", output="two", **made)
    train(one)
    launch(tmp_path, [two])
    place.kill()
    first, second = tmp_path / "one", tmp_path / "two"
    apart = left.values(second, "train/engine_kl")
    assert len(apart) == 3
    assert max(apart) < 1e-6
    assert all(left.values(second, "train/gradient_norm")), "the weights move: stale ones would be far off"
    assert left.values(second, "train/reward") == pytest.approx(left.values(first, "train/reward"), rel=1e-6)
    assert left.values(second, "validation/reward") == pytest.approx(left.values(first, "validation/reward"), rel=1e-6)
    for key, value in left.weights(first).items():
        torch.testing.assert_close(left.weights(second)[key], value, rtol=1e-4, atol=1e-5)
    assert len(list((second / "weights").iterdir())) == 1
