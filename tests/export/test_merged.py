"""The whole model, adapters merged, as its own library loads it in a process that does not know us."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

LOGITS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
found = []
for base, *adapter in json.loads(sys.argv[2]):
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter[0]).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(adapter[0] if adapter else base)(sys.argv[1]).input_ids])
    with torch.no_grad():
        found.append({"logits": model(input_ids=ids).logits[0].float().tolist(), "dtype": str(model.dtype)})
print(json.dumps(found))
"""
TEXT = "move the red ball now"

KINDS = [
    ("llm.sft", False),
    ("llm.sft", True),
    ("llm.dpo", True),
    pytest.param("llm.dpo", False, marks=pytest.mark.slow),
    pytest.param("llm.pretrain", False, marks=pytest.mark.slow),
    pytest.param("llm.pretrain", True, marks=pytest.mark.slow),
]
LORA = ("model.lora.rank=4",)


@pytest.fixture(scope="session")
def logits(outside, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`logits(name=[model], other=[base, adapter])`: what transformers, and PEFT, make of a text, in one process."""

    def ask(**jobs: list[Any]) -> dict[str, Any]:
        rows = outside(LOGITS, TEXT, json.dumps([[str(path) for path in job] for job in jobs.values()]))
        return dict(zip(jobs, rows, strict=True))

    return ask


@pytest.mark.serves("merged", "llm.sft", "transformers")
@pytest.mark.serves("merged", "llm.dpo", "transformers")
@pytest.mark.serves("merged", "llm.pretrain", "transformers")
@pytest.mark.parametrize(("kind", "lora"), KINDS)
def test_a_language_model(kind: str, lora: bool, exported, checkpoint_of, base_of, logits) -> None:
    changes = LORA if lora else ()
    place, report = exported(kind, "merged", *changes)
    assert report["usable"]
    assert report["largest_difference"] <= report["allowed_difference"] < 0.01
    assert report["inputs"] == report["same_text"]
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], rel=1e-4)
    model, base = checkpoint_of(kind, *changes) / "model", base_of("llm")
    told = logits(found=[place], expected=[base, model] if lora else [model], untouched=[base])
    np.testing.assert_allclose(told["found"]["logits"], told["expected"]["logits"], atol=1e-4)
    assert np.abs(np.array(told["found"]["logits"]) - told["untouched"]["logits"]).max() > 0.01


# ------------------------------------------------------------------------------------------------ fault 20


TIED: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "plain": (("model.lora.target_modules=[q_proj]",), True),
    "lora on the output layer": (("model.lora.target_modules=[q_proj, lm_head]",), False),
    "the output layer whole": (
        ("model.lora.target_modules=[q_proj]", "model.lora.modules_to_save=[lm_head]"), False,
    ),
    "lora on the token table": (("model.lora.target_modules=[q_proj, embed_tokens]",), False),
    "new tokens": (("model.new_tokens=['<|note|>']",), True),
}  # fmt: skip
SLOW = ("plain", "the output layer whole")


@pytest.mark.parametrize("case", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in TIED])
def test_tied_embeddings_are_merged_right(case: str, exported) -> None:
    """In a model whose output layer is its token table: an adapter of one of the two leaves the other as it was. That
    transformers loads it so is what the comparison does."""
    from safetensors.torch import load_file

    changes, is_tied = TIED[case]
    place, report = exported("llm.sft", "merged", "model.lora.rank=4", *changes)
    assert report["usable"]
    assert report["largest_difference"] < 1e-4 * report["largest_number"]
    config = json.loads((place / "config.json").read_text())
    assert config["tie_word_embeddings"] is is_tied
    tensors = load_file(place / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not is_tied
    assert config["vocab_size"] == len(tensors["model.embed_tokens.weight"])


@pytest.mark.serves("adapter", "llm.sft", "PEFT")
def test_other_numbers_and_the_adapter_alone(exported, base_of, logits) -> None:
    """A loader without options takes numbers as they are; with PEFT the adapter gives what the merged model gives."""
    merged, _ = exported("llm.sft", "merged", *LORA)
    adapter, report = exported("llm.sft", "adapter", *LORA)
    assert report["usable"]
    jobs: dict[str, list[Any]] = {"merged": [merged], "adapter": [base_of("llm"), adapter]}
    for dtype in ("bfloat16", "float16"):
        jobs[dtype] = [exported("llm.sft", "merged", dtype=dtype)[0]]
        report = exported("llm.sft", "merged", dtype=dtype)[1]
        assert report["usable"]
        assert 0 < report["largest_difference"] <= report["allowed_difference"]
    told = logits(**jobs)
    np.testing.assert_allclose(told["adapter"]["logits"], told["merged"]["logits"], atol=1e-4)
    assert [told[name]["dtype"] for name in jobs] == ["torch.float32"] * 2 + ["torch.bfloat16", "torch.float16"]
