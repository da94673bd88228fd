"""GGUF for the Llama and Qwen families, in processes that do not know us: by llama.cpp and by transformers' reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.errors import ExportError
from luthier.export.formats import SLACK, TOLERANCE
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
# What transformers makes of texts: tokens, the most probable ones that follow, log-probabilities of all at each place.
EXPECTED = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer, rows = AutoTokenizer.from_pretrained(sys.argv[1]), []
ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])  # llama.cpp stops at any that it knows
for text in json.loads(sys.argv[2]):
    given = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    with torch.no_grad():
        whole = model.generate(given, attention_mask=torch.ones_like(given), **options)[0]
        logits = model(input_ids=given).logits[0]
    said = whole[given.shape[1] :].tolist()  # the end is told too
    rows.append({"ids": given[0].tolist(), "said": said, "log_probs": logits.log_softmax(-1).tolist()})
print(json.dumps(rows))
"""
# The same by llama.cpp's server, in float32 throughout. It tells probabilities of a token that it has chosen and that
# is text, hence the bias, which they do not include.
LLAMA_CPP = """
import urllib.request
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 128, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)

def ask(path, **body):
    content = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), content)
    with urllib.request.urlopen(request, timeout=300) as found:
        return json.load(found)

size, rows = int(sys.argv[3]), []
text = ask("/tokenize", content="now")["tokens"][-1]
for given in json.loads(sys.argv[2]):
    ids, places = ask("/tokenize", content=given)["tokens"], []
    said = ask("/completion", prompt=given, n_predict=12, temperature=0.0, return_tokens=True)["tokens"]
    for end in range(1, len(ids) + 1):
        options = {"n_predict": 1, "n_probs": size, "temperature": 0.0, "logit_bias": [[text, 1000.0]]}
        found = ask("/completion", prompt=ids[:end], **options)["completion_probabilities"][0]["top_logprobs"]
        places.append([one["logprob"] for one in sorted(found, key=lambda one: one["id"])])
    rows.append({"ids": ids, "said": said, "log_probs": places})
print(json.dumps(rows))
"""


def loss(rows: list[dict[str, Any]]) -> float:
    """Mean cross-entropy of the tokens that follow the first, in nats."""
    told = [np.array(row["log_probs"])[np.arange(len(row["ids"]) - 1), row["ids"][1:]] for row in rows]
    return -float(np.concatenate(told).mean())


def gap(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    """Largest difference of a log-probability, as a share of the largest of them."""
    told, wanted = (np.concatenate([np.array(row["log_probs"]) for row in rows]) for rows in (found, expected))
    return float(np.abs(told - wanted).max() / np.abs(wanted).max())


@pytest.mark.serves("gguf", "llm.sft", "transformers' reader")
@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-4), ("float16", 2.0**-7), ("q8_0", 2.0**-4), ("q4_0", 2.0**-1)]
)
def test_a_trained_llama(dtype: str, bound: float, exported, outside) -> None:
    place, report = exported("llm.sft", "gguf", dtype=dtype, model="llm-gpt2")
    assert report["usable"]
    slack = 0.05 if dtype == "q4_0" else 0.02
    assert report["metrics"]["loss"]["artifact"] == pytest.approx(report["metrics"]["loss"]["trained"], abs=slack)
    whole, _ = exported("llm.sft", "merged", model="llm-gpt2")
    ids = json.dumps(list(range(5, 25)))
    found, expected = outside(READ, place, ids, "gguf"), outside(READ, whole, ids)
    scale = np.abs(expected["logits"]).max()
    assert np.abs(np.array(found["logits"]) - expected["logits"]).max() <= bound * scale
    assert found["ids"] == expected["ids"]
    names = {"float32": 4.0, "float16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
    model = hf.AutoModelForCausalLM.from_pretrained(whole)
    table, matrices = model.get_input_embeddings().weight.numel(), sum(one.numel() for one in model.parameters())
    eight = table * (34 - 18) / 32 if dtype == "q4_0" else 0
    assert (place / "model.gguf").stat().st_size < matrices * names[dtype] + eight + 60_000


@pytest.mark.serves("gguf", "llm.sft", "llama.cpp")
def test_a_trained_llama_in_llama_cpp(exported, checkpoint_of, outside) -> None:
    """It parts texts into the same tokens, those of the chat template too, and gives the same probabilities; where
    weights are rounded to 8 or 4 bits, and it rounds activations to 8, the loss is what is compared."""
    pytest.importorskip("xllamacpp")
    whole, _ = exported("llm.sft", "merged", model="llm-gpt2")
    tokenizer = hf.AutoTokenizer.from_pretrained(whole)
    rows = (checkpoint_of("llm.sft", model="llm-gpt2").parents[2] / "rows.jsonl").read_text().splitlines()
    chats = [json.loads(row)["messages"] for row in rows[:4]]
    texts = [TEXT, *(str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats)]
    expected = outside(EXPECTED, whole, json.dumps(texts))
    for dtype in ("float32", "float16", "q8_0", "q4_0"):
        place, report = exported("llm.sft", "gguf", dtype=dtype, model="llm-gpt2")
        assert report["usable"], dtype
        found = outside(LLAMA_CPP, place / "model.gguf", json.dumps(texts), len(expected[0]["log_probs"][0]))
        assert [row["ids"] for row in found] == [row["ids"] for row in expected]
        assert abs(loss(found) - loss(expected)) <= SLACK[dtype] * max(1.0, loss(expected)), dtype
        if dtype.startswith("float"):
            assert [row["said"] for row in found] == [row["said"] for row in expected], dtype
            assert gap(found, expected) <= (1e-5 if dtype == "float32" else TOLERANCE[dtype])


@pytest.fixture(scope="module")
def family_of(base_of, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """`family_of(name)`: a model of the family, and its GGUF."""
    return cache(lambda family: written(family, base_of("llm-gpt2"), tmp_path_factory.mktemp(family)))


def written(family: str, base: str, folder: Path) -> tuple[Path, Path]:
    """Untied, with fewer keys than queries, and biases where the family has them. transformers' reader takes 128 for
    Qwen3's size of a head whatever the file says."""
    tokenizer = hf.AutoTokenizer.from_pretrained(base)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 128 if family == "Qwen3" else 16, "initializer_range": 0.2,
             "max_position_embeddings": 128,
             "tie_word_embeddings": False}  # fmt: skip
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(vocab_size=len(tokenizer), **sizes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    whole, place = folder / "whole", folder / "out"
    place.mkdir()
    model.save_pretrained(whole)
    tokenizer.save_pretrained(whole)
    gguf.write(Source(SimpleNamespace(), whole, whole), place, "float32")
    return whole, place


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_each_family(family: str, family_of, outside) -> None:
    whole, place = family_of(family)
    ids = json.dumps(list(range(5, 25)))
    found, expected = outside(READ, place, ids, "gguf"), outside(READ, whole, ids)
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-3)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_each_family_in_llama_cpp(family: str, family_of, outside) -> None:
    pytest.importorskip("xllamacpp")
    whole, place = family_of(family)
    texts = json.dumps([TEXT, "take a spoon, 12 lamps\n  and drop it's"])
    expected = outside(EXPECTED, whole, texts)
    found = outside(LLAMA_CPP, place / "model.gguf", texts, len(expected[0]["log_probs"][0]))
    assert [row["ids"] for row in found] == [row["ids"] for row in expected]
    assert [row["said"] for row in found] == [row["said"] for row in expected]
    assert gap(found, expected) <= 1e-5


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
