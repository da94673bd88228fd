"""Log-probabilities and entropies at a temperature against those of whole logits, forward and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from luthier.common.losses import TokenLoss
from luthier.modalities.llm.model import Head, load_model
from luthier.modalities.llm.rl import scores as module
from luthier.modalities.llm.rl.scores import scores


@pytest.fixture
def head_of(recipe_of):
    def make(name: str, *overrides: str) -> tuple[Any, Head]:
        recipe = recipe_of(*overrides, model=name)
        tokenizer = hf.AutoTokenizer.from_pretrained(recipe.model.path)
        _, causal = load_model(recipe, tokenizer, None)
        return causal, Head(causal, TokenLoss())

    return make


LORA = ("model.lora.rank=2", "model.lora.target_modules=[q_proj]")
ON_HEAD = ("model.lora.rank=2", "model.lora.target_modules=[q_proj, lm_head]")


@pytest.mark.parametrize("rows", [1000, 3], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("entropic", [False, True])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("llama", ()), ("llama-tied", ()), ("gemma2", ()), ("granite", ()), ("llama", LORA), ("llama", ON_HEAD)],
    ids=["llama", "tied", "capped", "scaled", "frozen", "adapted"],
)
def test_scores_and_their_gradients(name, overrides, entropic, rows, head_of, monkeypatch) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda weight: rows)
    causal, head = head_of(name, *overrides)
    torch.manual_seed(1)
    hidden = torch.randn(8, causal.config.hidden_size, requires_grad=True)
    labels = torch.randint(0, causal.config.vocab_size, (8,))
    factors = torch.randn(2, 8)
    weights = [p for p in head.module.parameters() if p.requires_grad]

    def gradients(log_probs: torch.Tensor, entropy: torch.Tensor) -> list[torch.Tensor]:
        total = (log_probs * factors[0]).sum() + ((entropy * factors[1]).sum() if entropic else 0.0)
        return list(torch.autograd.grad(total, [hidden, *weights]))

    logits = head.logits(hidden) / 0.7
    whole = logits.log_softmax(dim=1)
    expected = whole.gather(1, labels[:, None])[:, 0], -(whole.exp() * whole).sum(dim=1)
    found = scores(head, hidden, labels, 0.7, entropic)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert found[1].requires_grad == entropic
    wanted = gradients(*expected)
    for one, other in zip(gradients(*found), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(wanted) == (1 if overrides == LORA else 3 if overrides == ON_HEAD else 2)


def test_fault_22_the_temperature_is_in_the_log_probabilities(head_of) -> None:
    causal, head = head_of("llama")
    hidden, labels = torch.randn(4, causal.config.hidden_size), torch.tensor([1, 2, 3, 4])
    cold, warm = (scores(head, hidden, labels, t)[0] for t in (0.5, 2.0))
    assert float((cold - warm).detach().abs().min()) > 1e-3


def test_of_nothing(head_of) -> None:
    causal, head = head_of("llama")
    hidden = torch.zeros(0, causal.config.hidden_size, requires_grad=True)
    found = scores(head, hidden, torch.zeros(0, dtype=torch.int64))
    assert [len(one) for one in found] == [0, 0]
    found[0].sum().backward()
