"""The engine in the trainer's process, against transformers' own generation and full forward passes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.cache_utils import DynamicCache

from luthier.common.losses import TokenLoss
from luthier.modalities.llm.model import Head, load_model
from luthier.modalities.llm.rl.engines.choice import choose
from luthier.modalities.llm.rl.engines.engine import Completion, Sampling
from luthier.modalities.llm.rl.engines.local import LocalEngine

PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([5], [7, 8, 9, 10, 11, 12], [3, 4, 5], [20, 21, 22, 23])]
NONE = (-1,)


@pytest.fixture
def engine_of(recipe_of):
    def make(name: str = "llama", batch: int = 64) -> LocalEngine:
        recipe = recipe_of(model=name)
        tokenizer = hf.AutoTokenizer.from_pretrained(recipe.model.path)
        _, causal = load_model(recipe, tokenizer, None)
        return LocalEngine(causal.eval(), Head(causal, TokenLoss()), batch)

    return make


def plain(recipe: Any) -> Any:
    found = hf.AutoModelForCausalLM.from_pretrained(recipe.model.path, attn_implementation="eager", dtype=torch.float32)
    found.generation_config = hf.GenerationConfig()  # else its own EOS would end what is generated
    return found.eval()


def rows(found: list[list[Completion]]) -> list[list[list[int]]]:
    return [[one.tokens.tolist() for one in group] for group in found]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral", "mixtral"])
def test_greedy_completions_are_transformers_own(name: str, engine_of, recipe_of) -> None:
    """Past the windows of those that have one; prompts of different lengths in one batch."""
    model = plain(recipe_of(model=name))
    found = engine_of(name).generate(PROMPTS, Sampling(12, NONE, 0.0), [[0, 0]] * len(PROMPTS))
    for prompt, group in zip(PROMPTS, rows(found), strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        config = hf.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert group == [expected[0, len(prompt) :].tolist()] * 2


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_log_probabilities_are_those_of_a_full_forward(name: str, temperature: float, engine_of, recipe_of) -> None:
    model = plain(recipe_of(model=name))
    seeds = [[10 * at + number for number in range(3)] for at in range(len(PROMPTS))]
    found = engine_of(name).generate(PROMPTS, Sampling(10, NONE, temperature), seeds)
    for prompt, group in zip(PROMPTS, found, strict=True):
        for one in group:
            ids = torch.from_numpy(np.concatenate([prompt, one.tokens]).astype(np.int64))
            with torch.no_grad():
                logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
            expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(one.log_probs, expected.numpy(), rtol=1e-5, atol=1e-5)
            assert not one.finished
    assert len({tuple(one.tokens) for group in found for one in group}) == 12


def test_a_completion_does_not_depend_on_what_else_is_asked(engine_of) -> None:
    """Alone, with others, in small batches, and with more seeds for its prompt."""
    seeds = [[100 * at + number for number in range(4)] for at in range(len(PROMPTS))]
    sampling = Sampling(12, (17, 30, 41), 1.3)
    whole = rows(engine_of().generate(PROMPTS, sampling, seeds))
    assert rows(engine_of(batch=3).generate(PROMPTS, sampling, seeds)) == whole
    for at, prompt in enumerate(PROMPTS):
        assert rows(engine_of().generate([prompt], sampling, [seeds[at][2:3]])) == [whole[at][2:3]]
    mixed = rows(engine_of().generate(PROMPTS[::-1], sampling, [of[:2] for of in seeds[::-1]]))
    assert mixed[::-1] == [group[:2] for group in whole]


def test_a_completion_ends_at_every_terminator(engine_of) -> None:
    free = engine_of().generate(PROMPTS[:2], Sampling(12, NONE, 1.0), [[1, 2, 3], [4, 5, 6]])
    stops = (int(free[0][0].tokens[3]), int(free[1][2].tokens[6]))
    found = engine_of().generate(PROMPTS[:2], Sampling(12, stops, 1.0), [[1, 2, 3], [4, 5, 6]])
    for before, after in zip(free, found, strict=True):
        for one, other in zip(before, after, strict=True):
            ids = one.tokens.tolist()
            end = next((at for at, number in enumerate(ids) if number in stops), None)
            assert other.tokens.tolist() == (ids if end is None else ids[: end + 1])
            assert other.finished == (end is not None)
            np.testing.assert_allclose(other.log_probs, one.log_probs[: len(other.tokens)], rtol=1e-5, atol=1e-6)
    assert found[0][0].finished
    assert found[1][2].finished
    assert not all(one.finished for group in found for one in group)


def test_a_prompt_is_computed_once_and_finished_rows_leave(engine_of, monkeypatch) -> None:
    made = engine_of()
    decoder, sizes = made.causal.get_decoder(), []
    monkeypatch.setattr(
        decoder, "forward", lambda *a, _f=decoder.forward, **k: sizes.append(tuple(k["input_ids"].shape)) or _f(*a, **k)
    )
    free = made.generate(PROMPTS[1:2], Sampling(6, NONE, 1.0), [[1, 2, 3]])
    assert sizes == [(1, 6), *[(3, 1)] * 5]
    sizes.clear()
    made.generate(PROMPTS[1:2], Sampling(6, (int(free[0][1].tokens[1]),), 1.0), [[1, 2, 3]])
    assert (2, 1) in sizes


def test_no_completion_goes_past_the_model_s_positions(engine_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a row whose completion has ended, while it is still in the batch."""
    made, decoded, places = engine_of(), LocalEngine._decoded, list[int]()

    def watched(engine: LocalEngine, ids: Any, mask: Any, positions: torch.Tensor, cache: Any) -> Any:
        places.append(int(positions.max()))
        return decoded(engine, ids, mask, positions, cache)

    monkeypatch.setattr(LocalEngine, "_decoded", watched)
    made.causal.config.max_position_embeddings = 8
    found = made.generate(PROMPTS, Sampling(12, NONE, 0.0), [[0]] * len(PROMPTS))
    assert [len(one.tokens) for (one,) in found] == [8, 3, 6, 5]
    assert max(places) == 7


def test_what_has_ended_stays_in_the_batch_until_there_is_enough_of_it(
    engine_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 completions one may end without a copy of the others; the completions are those of each alone."""
    made, seeds = engine_of(), list(range(8))
    free = made.generate(PROMPTS[1:2], Sampling(6, NONE, 1.0), [seeds])[0]
    stops = tuple({int(one.tokens[at]) for at, one in enumerate(free[:5])})
    copies = list[int]()
    select = DynamicCache.batch_select_indices

    def counted(cache: Any, indices: torch.Tensor) -> None:
        copies.append(len(indices))
        select(cache, indices)

    monkeypatch.setattr(DynamicCache, "batch_select_indices", counted)
    together = made.generate(PROMPTS[1:2], Sampling(6, stops, 1.0), [seeds])[0]
    assert copies[0] == 8, "the prompt, once for each"
    assert len(copies) > 1
    assert all(left < 0.75 * held for held, left in itertools.pairwise(copies))
    for seed, one in zip(seeds, together, strict=True):
        (alone,) = made.generate(PROMPTS[1:2], Sampling(6, stops, 1.0), [[seed]])[0]
        assert one.tokens.tolist() == alone.tokens.tolist()
        assert one.finished == alone.finished


def test_it_says_which_weights_it_has(engine_of) -> None:
    made = engine_of()
    made.update(7, None)
    assert made.generate(PROMPTS[:1], Sampling(1, NONE), [[0]])[0][0].version == 7


# ------------------------------------------------------------------------------------------------ choice

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0, 1.5, -3.0]])


@pytest.mark.parametrize(
    ("options", "allowed"),
    [({}, range(6)), ({"top_k": 2}, [1, 4]), ({"top_p": 0.6}, [1, 4]), ({"top_p": 0.001}, [1]),
     ({"top_k": 3, "top_p": 0.9}, [1, 2, 4]), ({"temperature": 0.0}, [1])],
)  # fmt: skip
def test_tokens_come_as_often_as_they_should(options: dict[str, Any], allowed: Any) -> None:
    """The share of numbers that give a token is its probability among those that are allowed."""
    sampling = Sampling(1, NONE, **options)
    random = (torch.arange(20_000) + 0.5) / 20_000
    drawn, log_probs = choose(LOGITS.expand(20_000, -1).clone(), random, sampling)
    weights = LOGITS[0].double().softmax(0)
    expected = torch.zeros(6, dtype=torch.float64)
    expected[list(allowed)] = weights[list(allowed)] / weights[list(allowed)].sum()
    torch.testing.assert_close(torch.bincount(drawn, minlength=6).double() / 20_000, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(log_probs.double(), weights.log()[drawn], rtol=1e-5, atol=1e-6)


def test_the_largest_number_gives_no_token_that_is_left_out() -> None:
    logits = torch.tensor([[1.0, 0.5, -40.0, -200.0]])
    for number in (1.0, 1 - 2**-24):
        drawn, _ = choose(logits.clone(), torch.tensor([number]), Sampling(1, NONE, top_k=2))
        assert int(drawn) in (0, 1)
