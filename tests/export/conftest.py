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
from luthier.export.run import export

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


def long_whisper(folder: Path) -> str:
    """The same with the context of 30 s that all real ones have, and without languages, which CTranslate2 tells by the
    size of the vocabulary."""
    from luthier.modalities.asr.demo import model

    kept, model.CHUNK_SECONDS = model.CHUNK_SECONDS, 30
    try:
        whisper_model(folder)
    finally:
        model.CHUNK_SECONDS = kept
    file = folder / "generation_config.json"
    settings = {name: value for name, value in json.loads(file.read_text()).items() if not name.endswith("_to_id")}
    file.write_text(json.dumps({**settings, "is_multilingual": False}))
    return str(folder)


def paraformer(folder: Path) -> str:
    """A small Paraformer without dropout."""
    import yaml

    from luthier.modalities.asr.paraformer.toy import make_model

    make_model(folder, [sentence(number) for number in range(12)])
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for part in ("encoder_conf", "decoder_conf"):
        rates = {name: 0.0 for name in config[part] if name.endswith("dropout_rate")}
        config[part] |= {"num_blocks": 2, "linear_units": 128, **rates}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder)


def conformer(folder: Path) -> str:
    """NeMo's configuration of a small Conformer for CTC without dropout."""
    import yaml

    from luthier.modalities.asr.nemo.toy import conformer_ctc

    config = conformer_ctc(width=32, layers=1, heads=2, kernel=5)
    config["encoder"] |= {name: 0.0 for name in config["encoder"] if name.startswith("dropout")}
    (folder / "model.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "model.yaml")


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


def ctc_model(folder: Path, family: str = "wav2vec2") -> str:
    """A small wav2vec 2.0, or a w2v-BERT, which hears mel features."""
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", *string.ascii_lowercase]
    (folder / "vocab.json").write_text(json.dumps({token: at for at, token in enumerate(tokens)}))
    spoken = hf.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    rates = [f"{part}_dropout" for part in ("attention", "hidden", "activation", "feat_proj", "final")]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
             "vocab_size": len(tokens), "pad_token_id": 0, "initializer_range": 0.2,
             **dict.fromkeys(rates, 0.0)}  # fmt: skip
    torch.manual_seed(0)
    if family == "wav2vec2":
        convolutions = {"conv_dim": (16, 16), "conv_stride": (10, 32), "conv_kernel": (20, 40),
                        "num_feat_extract_layers": 2, "feat_extract_norm": "layer", "do_stable_layer_norm": True,
                        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}  # fmt: skip
        model: Any = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**sizes, **convolutions))
        processor: Any = hf.Wav2Vec2Processor(hf.Wav2Vec2FeatureExtractor(return_attention_mask=True), spoken)
    else:
        config = hf.Wav2Vec2BertConfig(**sizes, feature_projection_input_dim=160, conv_depthwise_kernel_size=5)
        model = hf.Wav2Vec2BertForCTC(config)
        processor = hf.Wav2Vec2BertProcessor(hf.SeamlessM4TFeatureExtractor(padding_value=1), spoken)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


MODELS: dict[str, Callable[[Path], str]] = {
    "llm": language_model,
    "llm-untied": lambda folder: language_model(folder, tied=False),
    "llm-gpt2": plain_model,
    "whisper": whisper_model,
    "whisper-30s": long_whisper,
    "ctc": ctc_model,
    "paraformer": paraformer,
    "conformer": conformer,
    "ctc-mel": lambda folder: ctc_model(folder, "w2v-bert"),
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
    "asr.ctc": ("ctc", recordings, {}),
    "asr.paraformer": ("paraformer", recordings, {}),
    "asr.nemo": ("conformer", recordings, {}),
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


@pytest.fixture(scope="session")
def exported(checkpoint_of, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """`exported(kind, format, *overrides, dtype=None, model=None)`: an artifact, made once, and its parity report."""

    @cache
    def make(kind: str, format: str, *overrides: str, dtype: str | None = None, model: str | None = None) -> Any:
        checkpoint = checkpoint_of(kind, *overrides, **({"model": model} if model else {}))  # one call, one training
        place = export(checkpoint, format, tmp_path_factory.mktemp("artifact") / format, dtype=dtype, inputs=4)
        return place, json.loads((place / "parity.json").read_text())

    return make


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # it would outlast the test
    monkeypatch.delenv("LUTHIER_OUTPUT", raising=False)


# ------------------------------------------------------------------------------------------------ from outside


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`outside(code, *arguments)`: what a script prints as JSON, run once by a process without our package."""

    @cache
    def run(code: str, *arguments: object) -> Any:
        folder = tmp_path_factory.mktemp("outside")
        script = folder / "script.py"
        script.write_text(
            "import sys\nsys.modules['luthier'] = None  # importing it is an error\n"
            "import json, pathlib\nimport numpy as np\n"
            + ("import torch\ntorch.set_num_threads(1)\n" if "torch" in code else "")
            + code
        )
        done = subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            capture_output=True, text=True, timeout=900, cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


HEARING = """
import soundfile
waves = [soundfile.read(name, dtype="float32")[0] for name in sys.argv[2:]]
folder = pathlib.Path(sys.argv[1])

def written(recogniser):
    texts = []
    for wave in waves:
        stream = recogniser.create_stream()
        stream.accept_waveform(16000, wave)
        recogniser.decode_stream(stream)
        texts.append(stream.result.text.strip())
    return texts
"""


@pytest.fixture(scope="session")
def outside_hearing(outside: Callable[..., Any]) -> Callable[..., Any]:
    """`outside_hearing(code, folder, *files)`: `outside` for code that finds an artifact's `folder`, recordings as
    `waves`, and what a recogniser of sherpa-onnx makes of these, `written(recogniser)`."""
    return lambda code, folder, *files: outside(HEARING + code, folder, *files)


@pytest.fixture(scope="session")
def same_texts() -> Callable[[list[str], list[str]], None]:
    def check(one: list[str], other: list[str]) -> None:
        assert one == other
        assert sum(bool(text) for text in one) >= 2, "a text that is empty proves nothing"

    return check
