"""Tiny CTC directories of each family, recordings of tones, and shortcuts to build what is tested.

Test files can't import from each other in pytest's importlib mode, so shared functions are fixtures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from luthier.modalities.asr.ctc.processing import CtcProcessing
from luthier.modalities.asr.ctc.task import Task

RATE = 16000
TEXTS = (
    ("hello world", "en"),
    ("ciao bella", "it"),
    ("buona sera", "it"),
    ("good day", "en"),
    ("how are you", "en"),
    ("one two", "en"),
    ("a", "en"),
    ("tre volte", "it"),
)
TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]

CONVOLUTIONS = {"conv_dim": (16, 16, 16), "conv_stride": (5, 8, 8), "conv_kernel": (10, 8, 8)}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 3,
    "initializer_range": 0.2,
    **CONVOLUTIONS,
}
NO_DROPOUT = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}


def tokenizer(folder: Path, tokens: Sequence[str] = TOKENS) -> hf.Wav2Vec2CTCTokenizer:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: at for at, token in enumerate(tokens)}), encoding="utf-8")
    return hf.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))


def configuration(family: str, size: int) -> Any:
    """A tiny configuration of a family; those with `-group` normalise over time in the first convolution."""
    name, _, norm = family.partition(":")
    raw = SMALL | NO_DROPOUT | {"vocab_size": size, "pad_token_id": 0}
    if norm:
        raw |= {"feat_extract_norm": norm, "do_stable_layer_norm": norm == "layer", "conv_bias": norm == "layer"}
    if name == "mms":
        layers = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
        return hf.Wav2Vec2Config(**raw, **layers, adapter_attn_dim=4)
    if name == "wav2vec2-bert":
        more = {"feature_projection_input_dim": 160, "conformer_conv_dropout": 0.0}
        kept = {key: value for key, value in raw.items() if not key.startswith(("conv_", "num_feat", "num_conv"))}
        return hf.Wav2Vec2BertConfig(**kept, **more, conv_depthwise_kernel_size=5)
    if name == "parakeet_ctc":
        encoder = hf.ParakeetEncoderConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            subsampling_factor=4,
            subsampling_conv_channels=8,
            conv_kernel_size=5,
            initializer_range=0.2,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            layerdrop=0.0,
        )
        return hf.ParakeetCTCConfig(vocab_size=size, pad_token_id=0, encoder_config=encoder.to_dict())
    return hf.AutoConfig.for_model(name, **raw)


def make_model(folder: Path, family: str, tokens: Sequence[str] = TOKENS) -> str:
    """A directory of a model with random weights, as transformers writes it."""
    torch.manual_seed(7)
    spoken = tokenizer(folder, tokens)
    config = configuration(family, len(tokens))
    model = hf.AutoModelForCTC.from_config(config)
    if family == "wav2vec2-bert":
        extractor: Any = hf.SeamlessM4TFeatureExtractor(padding_value=1)
        processor: Any = hf.Wav2Vec2BertProcessor(extractor, spoken)
    elif family == "parakeet_ctc":
        extractor = hf.ParakeetFeatureExtractor()
        processor = hf.ParakeetProcessor(extractor, spoken)
    else:
        extractor = hf.Wav2Vec2FeatureExtractor(return_attention_mask=not family.endswith("group"))
        processor = hf.Wav2Vec2Processor(extractor, spoken)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory) -> Callable[..., str]:
    """`model_of(family)`: such a directory, made once."""
    made: dict[Any, str] = {}

    def make(family: str, tokens: Sequence[str] = TOKENS) -> str:
        key = family, tuple(tokens)
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family.replace(":", "-")), family, tokens)
        return made[key]

    return make


@pytest.fixture(scope="session")
def wav2vec2(model_of) -> str:
    """wav2vec 2.0 whose first convolution normalises over time, as the base models'."""
    return model_of("wav2vec2:group")


@pytest.fixture(scope="session")
def manifest(tone, write_manifest, tmp_path_factory) -> Path:
    """A manifest of 8 tones of 0.6 to 1.3 s, of two languages and two speakers."""
    rows = [{"text": text, "language": language, "speaker": "ab"[at % 2]} for at, (text, language) in enumerate(TEXTS)]
    return write_manifest(tmp_path_factory.mktemp("tones"), [tone(at, 0.6 + 0.1 * at) for at in range(8)], rows)


@pytest.fixture(scope="session")
def changed(manifest) -> Callable[..., str]:
    """`changed(name, *texts)`: a manifest of the same recordings with these texts."""

    def make(name: str, *texts: str) -> str:
        lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
        rows = [line | {"text": text} for line, text in zip(lines, texts, strict=False)]
        file = manifest.parent / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    return make


@pytest.fixture(scope="session")
def make_recipe(recipes, manifest, tmp_path_factory) -> Callable[..., Any]:
    """`make_recipe(path, **sections)`: see `recipes`."""
    return recipes(manifest, tmp_path_factory.mktemp("output"), {"kind": "asr.ctc"}, {"freeze_feature_encoder": False})


@pytest.fixture(scope="session")
def make_processing(make_recipe) -> Callable[..., CtcProcessing]:
    """`make_processing(path, weights=None, **sections)`: the data path of such a recipe."""

    def make(path: str, /, weights: Path | None = None, **sections: Any) -> CtcProcessing:
        return CtcProcessing(make_recipe(path, **sections), weights)

    return make


@pytest.fixture(scope="session")
def make_task(make_recipe) -> Callable[..., Task]:
    """`make_task(path, weights=None, **sections)`: the task of such a recipe."""

    def make(path: str, /, weights: Path | None = None, **sections: Any) -> Task:
        return Task(make_recipe(path, **sections), weights)

    return make


@pytest.fixture(scope="session")
def collated(collator) -> Callable[..., dict[str, Any]]:
    """`collated(processing, indices, generator)`: see `collator`."""
    return collator((0, 1, 6, 7))
