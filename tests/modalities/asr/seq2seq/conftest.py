"""Tiny encoder-decoder directories of each family, recordings of tones, and shortcuts to build what is tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as hf

from luthier.modalities.asr.seq2seq.processing import Seq2SeqProcessing
from luthier.modalities.asr.seq2seq.task import Task

TEXTS = (
    ("hello world", "en"), ("ciao bella", "it"), ("buona sera", "it"), ("good day", "en"), ("how are you", "en"),
    ("one two", "en"), ("a", "en"), ("tre volte", "it"),
)  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>", "<|en|>", "<|it|>"]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Letters as tokens."""
    listed = [*SPECIAL, " ", *"abcdefghijklmnopqrstuvwxyz'"]
    letters = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: at for at, token in enumerate(listed)}, unk_token="<unk>")
    )
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=letters, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
        extra_special_tokens=SPECIAL[3:],
    )  # fmt: skip


def model(family: str, size: int) -> tuple[Any, Any]:
    """(model, processor) with random weights."""
    ids = {"vocab_size": size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "decoder_start_token_id": 1}
    spoken = tokenizer()
    if family == "moonshine":
        config: Any = hf.MoonshineConfig(
            hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
            encoder_num_attention_heads=2, decoder_num_attention_heads=2, max_position_embeddings=40,
            initializer_range=0.2, **ids,
        )  # fmt: skip
        extractor: Any = hf.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
        return hf.MoonshineForConditionalGeneration(config), hf.Wav2Vec2Processor(extractor, spoken)
    if family == "canary":
        encoder = {
            "model_type": "parakeet_encoder", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 48, "subsampling_factor": 4, "subsampling_conv_channels": 8, "conv_kernel_size": 5,
            "initializer_range": 0.2, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
            "layerdrop": 0.0, "num_mel_bins": 80, "scale_input": False,
        }  # fmt: skip
        decoder = {
            "vocab_size": size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2, "eos_token_id": 2,
            "pad_token_id": 2, "bos_token_id": 1, "max_position_embeddings": 40,
        }  # fmt: skip
        config = hf.CanaryConfig(encoder_config=encoder, decoder_config=decoder, **ids)
        return hf.CanaryForConditionalGeneration(config), hf.CanaryProcessor(hf.ParakeetFeatureExtractor(), spoken)
    config = hf.Speech2TextConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, conv_channels=16, max_target_positions=40, dropout=0.0, init_std=0.2,
        **ids,
    )  # fmt: skip
    extractor = hf.Speech2TextFeatureExtractor()
    return hf.Speech2TextForConditionalGeneration(config), hf.Speech2TextProcessor(extractor, spoken)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory) -> Callable[[str], str]:
    """`model_of(family)`: a directory as transformers writes it, made once."""
    made: dict[str, str] = {}

    def make(family: str) -> str:
        if family not in made:
            torch.manual_seed(7)
            network, processor = model(family, len(tokenizer()))
            made[family] = str(tmp_path_factory.mktemp(family))
            network.save_pretrained(made[family])
            processor.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def manifest(tone, write_manifest, tmp_path_factory) -> Path:
    """A manifest of 8 tones of 0.6 to 1.3 s, of two languages."""
    rows = [{"text": text, "language": language} for text, language in TEXTS]
    return write_manifest(tmp_path_factory.mktemp("tones"), [tone(at, 0.6 + 0.1 * at) for at in range(8)], rows)


@pytest.fixture(scope="session")
def make_recipe(recipes, manifest, tmp_path_factory) -> Callable[..., Any]:
    """`make_recipe(path, **sections)`: see `recipes`."""
    return recipes(manifest, tmp_path_factory.mktemp("output"), {"kind": "asr.seq2seq"})


@pytest.fixture(scope="session")
def make_processing(make_recipe) -> Callable[..., Seq2SeqProcessing]:
    """`make_processing(path, **sections)`: the data path of such a recipe."""
    return lambda path, /, **sections: Seq2SeqProcessing(make_recipe(path, **sections))


@pytest.fixture(scope="session")
def make_task(make_recipe) -> Callable[..., Task]:
    """`make_task(path, weights=None, **sections)`: the task of such a recipe."""
    return lambda path, /, weights=None, **sections: Task(make_recipe(path, **sections), weights)


@pytest.fixture(scope="session")
def collated(collator) -> Callable[..., dict[str, Any]]:
    """`collated(processing, indices, generator)`: see `collator`."""
    return collator((0, 1, 6, 7))
