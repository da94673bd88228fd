"""Tiny Whisper directories (as in howto/whisper_tiny.py), recordings of tones, and shortcuts to build what is tested.

Test files can't import from each other in pytest's importlib mode, so shared functions are fixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers.pre_tokenizers import ByteLevel

from luthier.modalities.asr.whisper.processing import WhisperProcessing

RATE = 16000
CHUNK_SECONDS = 2
TARGET_POSITIONS = 64
END = "<|endoftext|>"
AFTER_LANGUAGES = "translate transcribe startoflm startofprev nospeech notimestamps"
SEED = 20240


def make_tokenizer(languages: Sequence[str], without: str = "") -> hf.WhisperTokenizer:
    """Bytes, control tokens in Whisper's order, and timestamps to 2.00; no merges, so a letter is a token.

    Args:
        without: bytes that the vocabulary lacks.
    """
    letters = [piece for piece in sorted(ByteLevel.alphabet()) if piece not in without]
    vocab = {piece: i for i, piece in enumerate([*letters, END])}
    tokenizer = hf.WhisperTokenizer(vocab=vocab, merges=[], pad_token=END)
    names = ["startoftranscript", *languages, *AFTER_LANGUAGES.split()]
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{name}|>" for name in names]})
    tokenizer.add_tokens([f"<|{i / 50:.2f}|>" for i in range(50 * CHUNK_SECONDS + 1)])
    return tokenizer


def save_whisper(folder: Path, tokenizer: hf.WhisperTokenizer, multilingual: bool, languages: Sequence[str]) -> Path:
    """A Whisper directory with random weights, as transformers writes it."""
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(SEED)
    config = hf.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        init_std=0.15,  # about 1 / sqrt(d_model): with 0.02 every logit is nearly 0 and nothing depends on the sound
        max_source_positions=50 * CHUNK_SECONDS,
        max_target_positions=TARGET_POSITIONS,
        pad_token_id=ids(END),
        bos_token_id=ids(END),
        eos_token_id=ids(END),
        decoder_start_token_id=ids("<|startoftranscript|>"),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = hf.WhisperForConditionalGeneration(config)
    settings = model.generation_config
    settings.is_multilingual = multilingual
    settings.no_timestamps_token_id = ids("<|notimestamps|>")
    settings.prev_sot_token_id = ids("<|startofprev|>")
    settings.return_timestamps = False
    settings.max_initial_timestamp_index = 50
    # As the published models have it: the start and control tokens never, a blank or the end not first.
    settings.suppress_tokens = [ids(f"<|{name}|>") for name in ("startoftranscript", *AFTER_LANGUAGES.split()[:-1])]
    settings.begin_suppress_tokens = [*tokenizer(" ", add_special_tokens=False).input_ids, ids(END)]
    settings.max_length = TARGET_POSITIONS
    if multilingual:
        settings.lang_to_id = {f"<|{name}|>": ids(f"<|{name}|>") for name in languages}
        settings.task_to_id = {name: ids(f"<|{name}|>") for name in ("transcribe", "translate")}
    settings._from_model_config = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    hf.WhisperFeatureExtractor(chunk_length=CHUNK_SECONDS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def multilingual(tmp_path_factory) -> str:
    """A multilingual Whisper that knows en, zh and it; "it" stands where Whisper's own list has "de"."""
    languages = ("en", "zh", "it")
    folder = tmp_path_factory.mktemp("multilingual")
    return str(save_whisper(folder, make_tokenizer(languages), True, languages))


@pytest.fixture(scope="session")
def all_languages(tmp_path_factory) -> str:
    """A multilingual Whisper with the languages of transformers' list, in its order, which transformers counts on."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    folder = tmp_path_factory.mktemp("all_languages")
    return str(save_whisper(folder, make_tokenizer(tuple(LANGUAGES)), True, tuple(LANGUAGES)))


@pytest.fixture(scope="session")
def english(tmp_path_factory) -> str:
    """An English-only Whisper; its vocabulary has language and task tokens all the same, as whisper-tiny.en's has."""
    return str(save_whisper(tmp_path_factory.mktemp("english"), make_tokenizer(("en", "zh", "it")), False, ()))


@pytest.fixture(scope="session")
def without_q(tmp_path_factory) -> str:
    """An English-only Whisper whose vocabulary can't write the letter q."""
    return str(save_whisper(tmp_path_factory.mktemp("without_q"), make_tokenizer(("en",), "q"), False, ()))


# ---------------------------------------------------------------------------------------------- recordings

TEXTS = (
    ("hello world", "en"),
    ("ciao bella", "it"),
    ("你好 世界", "zh"),
    ("good day", "en"),
    ("how are you", "en"),
    ("buona sera", "it"),
    ("one two", "en"),
    ("再见", "zh"),
    ("grazie", "it"),
    ("see you", "en"),
    ("a", "en"),
    ("tre volte", "it"),
)


@pytest.fixture(scope="session")
def manifest(tone, write_manifest, tmp_path_factory) -> Path:
    """A manifest of 12 tones of 0.6 to 1.7 s, of three languages and two speakers."""
    rows = [{"text": text, "language": language, "speaker": "ab"[at % 2]} for at, (text, language) in enumerate(TEXTS)]
    return write_manifest(tmp_path_factory.mktemp("tones"), [tone(at, 0.6 + 0.1 * at) for at in range(12)], rows)


@pytest.fixture(scope="session")
def make_recipe(recipes, manifest, tmp_path_factory) -> Callable[..., Any]:
    """`make_recipe(path, **sections)`: see `recipes`."""
    return recipes(manifest, tmp_path_factory.mktemp("output"), {"kind": "asr.whisper"})


@pytest.fixture(scope="session")
def make_processing(make_recipe) -> Callable[..., WhisperProcessing]:
    """`make_processing(path, **sections)`: the data path of such a recipe."""

    def make(path: str, /, **sections: Any) -> WhisperProcessing:
        recipe = make_recipe(path, **sections)
        return WhisperProcessing(recipe, recipe.model.path)

    return make


@pytest.fixture(scope="session")
def make_task(make_recipe) -> Callable[..., Any]:
    """`make_task(path, weights=None, **sections)`: the task of such a recipe."""
    from luthier.modalities.asr.whisper.task import Task

    def make(path: str, /, weights: Path | None = None, **sections: Any) -> Task:
        return Task(make_recipe(path, **sections), weights)

    return make


@pytest.fixture(scope="session")
def collated(collator) -> Callable[..., dict[str, Any]]:
    """`collated(processing, indices, generator)`: see `collator`."""
    return collator((0, 1, 2, 11))
