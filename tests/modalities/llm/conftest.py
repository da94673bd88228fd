"""Small tokenizers with the special tokens and the chat template of each family, small models, and shortcuts.

Test files can't import from each other in pytest's importlib mode, so shared functions are fixtures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from luthier.common import reading
from luthier.common.data.rows import Row
from luthier.modalities.llm.chat import Chat
from luthier.modalities.llm.conversation import Conversation, Text
from luthier.modalities.llm.shapes import item
from luthier.modalities.llm.template import ChatTemplate
from luthier.modalities.llm.tokens import Tokens

TEMPLATES = Path(__file__).parent / "templates"

LINES = (
    "What is the weather in Rome today? It is sunny and warm in Rome.",
    "You are helpful. Add two and three. The sum of two and three is five.",
    '{"name": "weather", "arguments": {"city": "Rome"}} user assistant system model',
    "Think before you answer.\n\nLet me think about the sum.\n",
)

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
DEEPSEEK = ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁output▁begin")

# family: template, special tokens, added tokens that are not special, BOS, EOS
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str | None, str]] = {
    "chatml": ("chatml", CHATML, (), None, "<|endoftext|>"),
    "tagged": ("tagged", CHATML, (), None, "<|endoftext|>"),
    "qwen2.5": ("qwen2.5", CHATML, QWEN[:2], None, "<|im_end|>"),
    "qwen3": ("qwen3", CHATML, QWEN, None, "<|im_end|>"),
    "llama3": (
        "llama3",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        (),
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ),
    "gemma": ("gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), (), "<bos>", "<eos>"),
    "mistral": (
        "mistral-v3",
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        (),
        "<s>",
        "</s>",
    ),
    "phi3": ("phi3", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), (), None,
             "<|endoftext|>"),
    "deepseek": (
        "deepseek-r1",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *(f"<｜{name}｜>" for name in DEEPSEEK),
         "<｜tool▁output▁end｜>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
}  # fmt: skip


def byte_level(special: tuple[str, ...], plain: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE trained on LINES."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in plain])
    return tokenizer


@cache
def _tokenizer(family: str, source: str | None = None) -> Any:
    name, special, plain, bos, eos = FAMILIES[family]
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(special, plain), bos_token=bos, eos_token=eos, pad_token=eos
    )
    tokenizer.chat_template = source or (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="session")
def families() -> tuple[str, ...]:
    return tuple(FAMILIES)


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[..., Any]:
    """The tokenizer of a family, with its template or another one."""
    return _tokenizer


@pytest.fixture(scope="session")
def chat_of() -> Callable[..., Chat]:
    """A Chat of a family; `variables` go to the template, `source` replaces it."""

    def make(family: str, *, source: str | None = None, variables: Any = None, **options: Any) -> Chat:
        tokenizer = _tokenizer(family, source)
        return Chat(tokenizer, ChatTemplate(tokenizer, variables=variables), **options)

    return make


@pytest.fixture(scope="session")
def example_of() -> Callable[..., Any]:
    """The example of a row's fields."""

    def make(shape: str | None = None, **fields: Any) -> Conversation | Text:
        return item(Row(fields, "rows.jsonl:1", Path(), "rows"), shape)

    return make


@pytest.fixture(scope="session")
def conversation_of(example_of) -> Callable[..., Conversation]:
    """A conversation of (role, content) pairs or message objects."""

    def make(*messages: Any, **fields: Any) -> Conversation:
        said = [one if isinstance(one, dict) else {"role": one[0], "content": one[1]} for one in messages]
        return example_of(messages=said, **fields)

    return make


@pytest.fixture(scope="session")
def segments_of() -> Callable[[Any, Tokens], list[tuple[str, bool]]]:
    """The tokens as text, in stretches with and without loss."""

    def make(tokenizer: Any, tokens: Tokens) -> list[tuple[str, bool]]:
        found: list[tuple[list[int], bool]] = []
        for number, carries in zip(tokens.ids.tolist(), tokens.trained.tolist(), strict=True):
            if not found or found[-1][1] != carries:
                found.append(([], carries))
            found[-1][0].append(number)
        return [(tokenizer.decode(ids), carries) for ids, carries in found]

    return make


# ------------------------------------------------------------------------------------------------ models

# Weights much larger than at the start of a training, so that attention and logits are far from uniform.
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "max_position_embeddings": 256,
}  # fmt: skip

# name: (transformers' name, what differs)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-dropout": ("Llama", {"attention_dropout": 0.2}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "final_logit_softcapping": 4.0, "attn_logit_softcapping": 2.0,
                          "query_pre_attn_scalar": 8}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "router_aux_loss_coef": 0.1}),
    "granite": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3,
                            "residual_multiplier": 0.7}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2,
                      "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}  # fmt: skip


def save_model(folder: Path, name: str = "llama", family: str = "chatml", rows: int = 0) -> None:
    """Write a small model with the tokenizer of a family; `rows`: of the vocabulary, more than tokens."""
    tokenizer = _tokenizer(family)
    kind, changes = MODELS[name]
    sizes = changes if kind == "GPT2" else SIZES | changes
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(hf, f"{kind}Config")(**{**ids, **sizes}, vocab_size=rows or len(tokenizer))
    torch.manual_seed(0)
    getattr(hf, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a small model, as `save_model` writes it."""

    @cache
    def make(name: str = "llama", family: str = "chatml", rows: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("model")
        save_model(folder, name, family, rows)
        return folder

    return make


# ------------------------------------------------------------------------------------------------ trainings

WORDS = [
    "weather", "Rome", "sunny", "warm", "helpful", "add", "two", "three", "sum", "five", "think", "answer", "city",
    "name",
]  # fmt: skip


def dialogue(number: int, turns: int = 1) -> dict[str, Any]:
    """A conversation of a length of its own."""
    messages = []
    for turn in range(turns):
        picked = [WORDS[(number * 3 + turn + at * at) % len(WORDS)] for at in range(2 + (number * 5 + turn) % 7)]
        messages.append({"role": "user", "content": f"What of {' '.join(picked[:3])}?"})
        messages.append({"role": "assistant", "content": f"It is {' '.join(picked)}."})
    return {"messages": messages, "topic": "even" if number % 2 == 0 else "odd"}


def write_rows(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., Path]:
    """A file of rows, or of `number` conversations of 1 to 3 turns."""

    def make(file: Path, rows: Sequence[Any] | int) -> Path:
        rows = [dialogue(at, 1 + at % 3) for at in range(rows)] if isinstance(rows, int) else rows
        return write_rows(file, rows)

    return make


def tree(model: Path, train: Path, output: Path, kind: str = "llm.sft") -> dict[str, Any]:
    return {
        "task": {"kind": kind},
        "model": {"path": str(model)},
        "data": {"train": str(train), "workers": 0, "max_length": 200},
        "optim": {"learning_rate": 1e-2, "schedule": "constant", "warmup": 0, "clip_norm": None},
        "train": {"epochs": 1, "accelerator": "cpu", "devices": 1, "log_every": 1, "threads": 1},
        "checkpoint": {"every": None, "keep_last": 99},
        "output": str(output),
    }


@pytest.fixture(scope="session")
def tree_of() -> Callable[..., Any]:
    """A recipe from its parts: folder of the model, file of rows, output, overrides."""

    def make(model: Path, train: Path, output: Path, *overrides: str, kind: str = "llm.sft") -> Any:
        return reading.build(reading.override(tree(model, train, output, kind), overrides), "test.yaml")

    return make


@pytest.fixture
def recipe_of(model_of, rows_of, tree_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A recipe for a small model on 12 conversations or the rows given."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # it would outlast the test
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)

    def make(
        *overrides: str,
        model: Path | str = "llama",
        rows: Any = 12,
        kind: str = "llm.sft",
        output: str = "run",
    ) -> Any:
        folder = model_of(model) if isinstance(model, str) else model
        file = rows if isinstance(rows, Path) else rows_of(tmp_path / f"{output}.jsonl", rows)
        return tree_of(folder, file, tmp_path / output, *overrides, kind=kind)

    return make


JOBS = """
import json, os, sys
from pathlib import Path
from luthier.common import reading
from luthier.common.training.run import train
for job in json.loads(Path(sys.argv[1]).read_text()):
    train(reading.build(job, "job.yaml"))
"""


@pytest.fixture(scope="session")
def launch() -> Callable[[Path, list[Any]], None]:
    """Run recipes one after the other in a process of its own, which starts those that `train.devices` asks for."""

    def run(root: Path, recipes: list[Any]) -> None:
        script, jobs = root / "jobs.py", root / "jobs.json"
        script.write_text(JOBS)
        jobs.write_text(json.dumps([recipe.model_dump(mode="json") for recipe in recipes]))
        kept = {
            name: value for name, value in os.environ.items() if name not in ("LUTHIER_OUTPUT", "LOCAL_RANK", "RANK")
        }
        path = os.pathsep.join([str(Path(__file__).parents[3] / "src"), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        done = subprocess.run(
            [sys.executable, str(script), str(jobs)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=root,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]

    return run
