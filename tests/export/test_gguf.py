"""GGUF for the Llama and Qwen families, read by transformers' reader in a process that does not know us."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.errors import ExportError
from luthier.export.source import Source
from luthier.export.targets import gguf

pytestmark = pytest.mark.slow  # each starts the runtime that serves it in a process of its own

TEXT = "move the red ball now"
READ = """
from transformers import AutoModelForCausalLM, AutoTokenizer
options = {"gguf_file": "model.gguf"} if len(sys.argv) > 3 else {}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **options).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], **options)
ids = json.loads(sys.argv[2])
with torch.no_grad():
    logits = model(input_ids=torch.tensor([ids])).logits[0].tolist()
print(json.dumps({"logits": logits, "ids": tokenizer(TEXT).input_ids}))
""".replace("TEXT", repr(TEXT))


@pytest.mark.serves("gguf", "llm.sft", "transformers' reader")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float16", 2.0**-7), ("q8_0", 2.0**-4)])
def test_a_trained_llama(dtype: str, bound: float, exported, outside) -> None:
    place, report = exported("llm.sft", "gguf", dtype=dtype, model="llm-gpt2")
    assert report["usable"]
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], abs=0.02)
    whole, _ = exported("llm.sft", "merged", model="llm-gpt2")
    ids = json.dumps(list(range(5, 25)))
    found, expected = outside(READ, place, ids, "gguf"), outside(READ, whole, ids)
    scale = np.abs(expected["logits"]).max()
    assert np.abs(np.array(found["logits"]) - expected["logits"]).max() <= bound * scale
    assert found["ids"] == expected["ids"]
    names = {"float32": 4.0, "float16": 2.0, "q8_0": 34 / 32}
    matrices = sum(value.numel() for value in hf.AutoModelForCausalLM.from_pretrained(whole).parameters())
    assert (place / "model.gguf").stat().st_size < matrices * names[dtype] + 60_000


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_each_family(family: str, base_of, outside, tmp_path: Path) -> None:
    """Untied, with fewer keys than queries, and biases where the family has them. transformers' reader, which is asked,
    takes 128 for Qwen3's size of a head whatever the file says."""
    tokenizer = hf.AutoTokenizer.from_pretrained(base_of("llm-gpt2"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 128 if family == "Qwen3" else 16, "initializer_range": 0.2,
             "max_position_embeddings": 128,
             "tie_word_embeddings": False}  # fmt: skip
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(vocab_size=len(tokenizer), **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    whole, place = tmp_path / "whole", tmp_path / "out"
    place.mkdir()
    model.save_pretrained(whole)
    tokenizer.save_pretrained(whole)
    gguf.write(Source(SimpleNamespace(), whole, whole), place, "float32")
    ids = json.dumps(list(range(5, 25)))
    found, expected = outside(READ, place, ids, "gguf"), outside(READ, whole, ids)
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-3)


def test_a_tokenizer_that_is_not_known_is_refused() -> None:
    """llama.cpp has its ways of parting texts by name, and would read other tokens without a word."""
    split = {"type": "Split", "pattern": {"Regex": "[0-9]"}}
    steps = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False}]}
    with pytest.raises(ExportError, match="parts texts"):
        gguf.split_of({"model": {"type": "BPE"}, "pre_tokenizer": steps})
    split["pattern"]["Regex"] = gguf.QWEN2
    assert gguf.split_of({"model": {"type": "BPE"}, "pre_tokenizer": steps}) == "qwen2"
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    assert gguf.split_of({"model": {"type": "BPE"}, "pre_tokenizer": plain}) == "gpt-2"
    with pytest.raises(ExportError, match="parts texts"):
        gguf.split_of({"model": {"type": "Unigram"}, "pre_tokenizer": plain})
