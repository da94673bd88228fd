"""Checkpoints of short trainings of small models, one of each kind, and a look at artifacts from outside.

Test files can't import from each other in pytest's importlib mode, so shared functions are fixtures.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common import reading
from luthier.common.checkpoint import directory
from luthier.common.training.run import train

WORDS = ["red", "ball", "lamp", "spoon", "move", "drop", "take", "the", "a", "now", "today", "upstairs"]


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * 3 + at * at) % len(WORDS)] for at in range(3 + number % 4))


def write_rows(file: Path, rows: Sequence[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


# ------------------------------------------------------------------------------------------------ models


def language_model(folder: Path, tied: bool = True) -> str:
    """A small Llama with words of its own."""
    from luthier.modalities.llm.arithmetic.model import make_model

    make_model(folder, [sentence(number) for number in range(12)])
    if not tied:
        model = hf.AutoModelForCausalLM.from_pretrained(folder)
        config = model.config
        config.tie_word_embeddings = False
        torch.manual_seed(0)
        hf.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def plain_model(folder: Path) -> str:
    """The same with GPT-2's way of parting texts, which llama.cpp knows."""
    from tokenizers import pre_tokenizers

    language_model(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save_pretrained(folder)
    return str(folder)


def whisper_model(folder: Path) -> str:
    from luthier.modalities.asr.demo.model import make_model

    make_model(folder, [sentence(number) for number in range(12)])
    return str(folder)


def bert(folder: Path, kind: str) -> str:
    """A small BERT of transformers."""
    signs = [*string.ascii_lowercase, *string.digits]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *(f"##{sign}" for sign in signs), *WORDS]
    tokenizer = hf.BertTokenizer(vocab={word: at for at, word in enumerate(words)}, model_max_length=64)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = hf.BertConfig(vocab_size=len(words), max_position_embeddings=64, initializer_range=0.2, **sizes)
    torch.manual_seed(0)
    getattr(hf, kind)(config).save_pretrained(folder)
    return str(folder)


MODELS: dict[str, Callable[[Path], str]] = {
    "llm": language_model,
    "llm-untied": lambda folder: language_model(folder, tied=False),
    "llm-gpt2": plain_model,
    "whisper": whisper_model,
    "bert": lambda folder: bert(folder, "BertModel"),
    "bert-mlm": lambda folder: bert(folder, "BertForMaskedLM"),
}


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a small model, by name."""
    return cache(lambda name: MODELS[name](tmp_path_factory.mktemp("base")))


# ------------------------------------------------------------------------------------------------ data


def conversations() -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": sentence(n)}, {"role": "assistant", "content": sentence(n + 5)}]}
        for n in range(10)
    ]


def preferences() -> list[dict[str, Any]]:
    return [{"prompt": sentence(n), "chosen": sentence(n + 3), "rejected": sentence(n + 4)} for n in range(10)]


def pairs() -> list[dict[str, Any]]:
    return [{"anchor": sentence(n), "positive": sentence(n + 1), "negative": sentence(n + 7)} for n in range(10)]


def recordings(folder: Path) -> list[dict[str, Any]]:
    import soundfile

    rows = []
    for number in range(8):
        generator, seconds = np.random.default_rng(number), 0.6 + 0.1 * number
        clock = np.arange(round(seconds * 16000)) / 16000
        wave = 0.2 * np.sin(2 * np.pi * (250 + 280 * number) * clock) + 0.003 * generator.standard_normal(len(clock))
        soundfile.write(folder / f"{number}.wav", wave.astype(np.float32), 16000, subtype="FLOAT")
        rows.append({"audio": f"{number}.wav", "text": sentence(number), "language": "en"})
    return rows


# kind: (model, rows, further sections)
KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llm.sft": ("llm", conversations, {}),
    "llm.pretrain": ("llm", lambda: [{"text": sentence(n)} for n in range(10)], {}),
    "llm.dpo": ("llm", preferences, {}),
    "llm.reward": ("llm", preferences, {}),
    "asr.whisper": ("whisper", recordings, {}),
    "embedding.dense": ("bert", pairs, {}),
    "embedding.sparse": ("bert-mlm", pairs, {}),
    "embedding.multi_vector": ("bert", pairs, {}),
    "embedding.reranker": ("bert", pairs, {"evaluate": {"metrics": ["reranking"], "at": [1, 2]}}),
}


@pytest.fixture(scope="session")
def checkpoint_of(base_of, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint_of(kind, *overrides, model=name)`: the checkpoint of a training of 4 steps."""

    @cache
    def make(kind: str, *overrides: str, model: str | None = None) -> Path:
        folder = tmp_path_factory.mktemp("run")
        name, rows, sections = KINDS[kind]
        made = rows(folder) if rows is recordings else rows()
        data = write_rows(folder / "rows.jsonl", made)
        tree = {
            "task": {"kind": kind},
            "model": {"path": base_of(model or name)},
            "data": {"train": data, "validation": data, "workers": 0, "batch": {"examples": 4}},
            "optim": {"learning_rate": 1e-2, "schedule": "constant", "warmup": 0},
            "train": {"steps": 4, "accelerator": "cpu", "devices": 1, "threads": 1},
            "checkpoint": {"every": None},
            "output": str(folder / "run"),
            **sections,
        }
        done = train(reading.build(reading.override(tree, overrides), "test.yaml"))
        return directory.committed(done.folder / "checkpoints")[-1]

    return make


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # it would outlast the test
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)


# ------------------------------------------------------------------------------------------------ from outside


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`outside(code, *arguments)`: what a script prints as JSON, run in a process that can't import our package."""

    def run(code: str, *arguments: object) -> Any:
        folder = tmp_path_factory.mktemp("outside")
        script = folder / "script.py"
        script.write_text(
            "import sys\nsys.modules['luthier'] = None  # importing it is an error\n"
            "import json, pathlib\nimport numpy as np\nimport torch\ntorch.set_num_threads(1)\n" + code
        )
        done = subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            capture_output=True, text=True, timeout=300, cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
