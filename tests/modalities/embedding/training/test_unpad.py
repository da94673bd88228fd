"""Layers that see real tokens only make of every text what they make of it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from luthier.common import attention
from luthier.modalities.embedding.encode import chunks, encode
from luthier.modalities.embedding.unpad import unpadded

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50,
    "initializer_range": 0.3,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1}),
    "electra": ("Electra", {"embedding_size": 32}),
    "llama": ("Llama", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}


def model_of(family: str) -> Any:
    attention.register()
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**{**SIZES, **changes})
    config._attn_implementation = attention.NAME
    return getattr(hf, f"{kind}Model")(config).eval()


def run_of(model: Any) -> Any:
    return lambda ids, mask: model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[:, :, None]


def texts(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 50, mask.shape, generator=torch.Generator().manual_seed(1))
    return torch.where(mask > 0, ids, torch.ones_like(ids)), mask


@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_is_as_it_is_alone(family: str) -> None:
    model = model_of(family)
    run = run_of(model)
    hooks = unpadded(model, run)
    assert hooks is not None
    lengths = [7, 5, 5, 2, 1]
    ids, mask = texts(lengths)
    with attention.watched() as windows, hooks.over(mask):
        found = run(ids, mask)
    assert len(windows) == SIZES["num_hidden_layers"]  # the layers did run on one row
    for row, length in enumerate(lengths):
        alone = model(input_ids=ids[row : row + 1, :length], attention_mask=mask[row : row + 1, :length])
        assert torch.allclose(found[row, :length], alone.last_hidden_state[0], rtol=0, atol=2e-6)
    assert not found[mask == 0].any()


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_gradients_are_those_of_the_padded_batch(family: str) -> None:
    model = model_of(family)
    run = run_of(model)
    hooks = unpadded(model, run)
    assert hooks is not None
    ids, mask = texts([6, 6, 4, 1])
    weight = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(2))
    (run(ids, mask) * weight).sum().backward()
    expected = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    with hooks.over(mask):
        out = run(ids, mask)
    (out * weight).sum().backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            size = float(expected[name].abs().max())
            assert float((parameter.grad - expected[name]).abs().max()) <= 1e-5 * max(size, 1.0), name


def test_a_model_with_an_attention_of_its_own_is_padded() -> None:
    torch.manual_seed(0)
    model = hf.MPNetModel(hf.MPNetConfig(**SIZES)).eval()
    assert unpadded(model, run_of(model)) is None


def test_the_probe_leaves_modes_as_they_were() -> None:
    model = model_of("bert").train()
    model.embeddings.eval()
    assert unpadded(model, run_of(model)) is not None
    assert model.training
    assert not model.embeddings.training


# ------------------------------------------------------------------------------------------------ chunks


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 12, 1000])
def test_chunks_hold_every_text_once_within_the_budget(padded: bool, budget: int) -> None:
    lengths = [9, 6, 6, 3, 2, 2, 1]
    parts = list(chunks(lengths, budget, padded))
    assert [at for part in parts for at in range(len(lengths))[part]] == list(range(len(lengths)))
    for part in parts:
        held = lengths[part]
        assert len(held) == 1 or (max(held) * len(held) if padded else sum(held)) <= budget


def test_recomputed_chunks_have_the_gradient_of_the_whole_with_the_same_dropout() -> None:
    """With dropout, drawn chunk by chunk: the same draw in both passes, and the same as without recomputing."""
    torch.manual_seed(0)
    config = hf.BertConfig(**{**SIZES, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3})
    attention.register()
    config._attn_implementation = attention.NAME
    model = hf.BertModel(config)
    hooks = unpadded(model.eval(), run_of(model))
    model.train()
    ids, mask = texts([6, 5, 3, 3, 2])

    def run(**given: Any) -> dict[str, Any]:
        return {"found": model(**given).last_hidden_state[:, 0]}

    gradients = []
    for recompute in (False, True):
        torch.manual_seed(5)
        model.zero_grad()
        given = {"input_ids": ids, "attention_mask": mask}
        found = encode(run, ("found",), given, hooks, 8, recompute)[0]
        assert found.shape == (5, 32)
        (found @ found.T).logsumexp(dim=1).sum().backward()  # every text meets every other
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_tokens_of_chunks_are_filled_up(tmp_path: Path) -> None:
    ids, mask = texts([6, 5, 3, 1])

    def run(**given: Any) -> dict[str, Any]:
        return {"tokens": given["input_ids"][..., None].float(), "mask": given["attention_mask"]}

    tokens, found = encode(run, ("tokens", "mask"), {"input_ids": ids, "attention_mask": mask}, None, 6, False)
    assert torch.equal(found, mask)
    assert torch.equal(tokens[..., 0] * mask, (ids * mask).float())
