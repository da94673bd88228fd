"""A tiny Qwen2-Audio, recordings of tones, and shortcuts to build what is tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as hf

from luthier.modalities.asr.llm.processing import SpeechLlmProcessing
from luthier.modalities.asr.llm.task import Task

TEXTS = (("hello world", "en"), ("ciao bella", "it"), ("a", "en"), ("tre volte", "it"))
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Printable characters as tokens."""
    listed = [*SPECIAL, "\n", *map(chr, range(32, 127))]
    letters = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: at for at, token in enumerate(listed)}, unk_token="~")
    )
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token=SPECIAL[1], pad_token=SPECIAL[1], extra_special_tokens=SPECIAL
    )


@pytest.fixture(scope="session")
def speaking(tmp_path_factory) -> str:
    """The directory of a model with random weights that hears up to 2 s, as transformers writes it."""
    torch.manual_seed(7)
    spoken = tokenizer()
    config = hf.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "encoder_layers": 1, "d_model": 16,
            "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "max_source_positions": 100, "initializer_range": 0.2,
        },
        text_config={
            "model_type": "qwen2", "vocab_size": len(spoken), "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2,
            "max_position_embeddings": 512,
        },
        audio_token_index=spoken.convert_tokens_to_ids("<|AUDIO|>"),
    )  # fmt: skip
    extractor = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    folder = tmp_path_factory.mktemp("qwen2-audio")
    hf.Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    hf.Qwen2AudioProcessor(extractor, spoken).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def manifest(tone, write_manifest, tmp_path_factory) -> Path:
    """A manifest of 4 tones of 0.6 to 1.5 s, of two languages."""
    rows = [{"text": text, "language": language} for text, language in TEXTS]
    return write_manifest(tmp_path_factory.mktemp("tones"), [tone(at, 0.6 + 0.3 * at) for at in range(4)], rows)


@pytest.fixture(scope="session")
def make_recipe(recipes, manifest, tmp_path_factory) -> Callable[..., Any]:
    """`make_recipe(path, **sections)`: see `recipes`."""
    return recipes(manifest, tmp_path_factory.mktemp("output"), {"kind": "asr.llm"})


@pytest.fixture(scope="session")
def make_processing(make_recipe) -> Callable[..., SpeechLlmProcessing]:
    """`make_processing(path, **sections)`: the data path of such a recipe."""
    return lambda path, /, **sections: SpeechLlmProcessing(make_recipe(path, **sections))


@pytest.fixture(scope="session")
def make_task(make_recipe) -> Callable[..., Task]:
    """`make_task(path, weights=None, **sections)`: the task of such a recipe."""
    return lambda path, /, weights=None, **sections: Task(make_recipe(path, **sections), weights)


@pytest.fixture(scope="session")
def collated(collator) -> Callable[..., dict[str, Any]]:
    """`collated(processing, indices, generator)`: see `collator`."""
    return collator((0, 1, 2, 3))
