"""Models that can't be trained on documents in one row are refused before a run, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from luthier.common import attention
from luthier.common.errors import ModelError
from luthier.common.losses import TokenLoss
from luthier.modalities.llm.model import Head
from luthier.modalities.llm.probe import probe

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60, "initializer_range": 0.2,
}  # fmt: skip


def made(kind: str = "Llama", **changes: Any) -> Any:
    attention.register()
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**{**SIZES, **changes}, attn_implementation=attention.NAME)
    return getattr(hf, f"{kind}ForCausalLM")(config)


def tried(causal: Any, max_length: int = 2048) -> None:
    probe(causal, Head(causal, TokenLoss()), max_length)


def refused(causal: Any, max_length: int = 2048) -> str:
    with pytest.raises(ModelError) as error:
        tried(causal, max_length)
    return str(error.value)


def test_what_can_be_trained() -> None:
    tried(made())
    tried(made().to(torch.bfloat16))


def test_logits_made_in_another_way() -> None:
    """Such as a family whose head divides by something that is not known here."""

    class Halved(hf.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.logits = found.logits * 0.5
            return found

    causal = made()
    causal.__class__ = Halved
    assert "its logits are made in a way that is not known" in refused(causal)


def test_layers_that_carry_a_state_over() -> None:
    """A convolution over the row, as hybrid models have it, sees the document before."""
    causal = made()
    inner = causal.model.layers[0].forward

    def carried(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = inner(hidden, *args, **kwargs)
        return found + 0.5 * nn.functional.pad(found, (0, 0, 1, 0))[:, :-1]

    causal.model.layers[0].forward = carried
    assert "a document changes the one after it" in refused(causal)


def test_positions_that_count_through_the_row() -> None:
    """Rotary positions are relative; GPT-2's are not."""
    attention.register()
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 60, "initializer_range": 0.2}
    causal = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_implementation=attention.NAME))
    tried(causal)
    inner = causal.transformer.forward

    def counted(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    causal.transformer.forward = counted
    assert "a document changes the one after it" in refused(causal)


def test_layers_of_an_unknown_kind() -> None:
    causal = made("Llama")
    causal.config.layer_types = ["full_attention", "chunked_attention"]
    assert "layers of the kind chunked_attention" in refused(causal)


def test_an_attention_of_its_own() -> None:
    """A model that does not ask transformers' registry attends with its mask alone."""
    causal = made()
    causal.config._attn_implementation = "eager"
    said = refused(causal)
    assert "documents in one row" in said


def test_a_hybrid_model() -> None:
    torch.manual_seed(0)
    config = hf.FalconMambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=60, state_size=4)
    assert "documents in one row" in refused(hf.FalconMambaForCausalLM(config))


def test_attention_sinks() -> None:
    layer, one = nn.Linear(1, 1), torch.zeros(1, 1, 2, 4)
    with pytest.raises(ModelError, match="s_aux"):
        attention.attend(layer, one, one, one, None, s_aux=torch.zeros(1))


def test_windows_that_layers_don_t_tell() -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    sliding = {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    causal = made("Qwen2Moe", shared_expert_intermediate_size=8, **experts, **sliding)
    assert causal.config.sliding_window == 16
    tried(causal, max_length=16)
    said = refused(causal, max_length=17)
    assert "at most 16" in said
    assert "data.max_length" in said


# ------------------------------------------------------------------------------------------------ ordinary masks


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Mistral"])
def test_generation_attends_as_the_model_s_own(kind: str) -> None:
    """With padding at the left, a cache, a sliding window of 6 and capped scores."""
    sizes = {"sliding_window": 6} if kind != "Llama" else {}
    causal = made(kind, **sizes)
    config = getattr(hf, f"{kind}Config")(**SIZES, **sizes, attn_implementation="eager")
    eager = getattr(hf, f"{kind}ForCausalLM")(config)
    eager.load_state_dict(causal.state_dict())
    ids = torch.arange(3, 23).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "output_scores": True,
        "return_dict_in_generate": True, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    ours, theirs = (model.eval().generate(ids, **options) for model in (causal, eager))
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for one, other in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture
def attended() -> Callable[..., Tensor]:
    """Attention over documents of 5, 1 and 9 tokens with 4 heads, of which pairs share keys."""

    def run(**options: Any) -> Tensor:
        torch.manual_seed(0)
        query, key, value = torch.randn(1, 4, 15, 8), torch.randn(1, 2, 15, 8), torch.randn(1, 2, 15, 8)
        mask = attention.as_mask(torch.tensor([0, 5, 6, 15], dtype=torch.int32), 9)
        found, _ = attention.attend(nn.Linear(1, 1), query, key, value, mask, **options)
        return found

    return run


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_attention_by_its_definition(window: int | None, cap: float | None, scaling: float | None, attended) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 15, 8), torch.randn(1, 2, 15, 8), torch.randn(1, 2, 15, 8)
    expected = torch.zeros(1, 15, 4, 8)
    for begin, end in ((0, 5), (5, 6), (6, 15)):
        for place in range(begin, end):
            first = begin if window is None else max(begin, place - window + 1)
            for head in range(4):
                scores = key[0, head // 2, first : place + 1] @ query[0, head, place] * (scaling or 8**-0.5)
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                expected[0, place, head] = scores.softmax(0) @ value[0, head // 2, first : place + 1]
    torch.testing.assert_close(attended(sliding_window=window, softcap=cap, scaling=scaling), expected)
