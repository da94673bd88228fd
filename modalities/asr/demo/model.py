"""A small Whisper from a configuration, with random weights and a tokenizer of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor, WhisperTokenizer

CHUNK_SECONDS = 2
_MOST_PIECES = 1000
_END = "<|endoftext|>"
# Whisper's order: a language's id is that of the start token plus its place in Whisper's list; times come last.
_CONTROL = (
    *["<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"],
    *["<|nospeech|>", "<|notimestamps|>"],
)


def make_model(folder: str | Path, texts: Iterable[str], seed: int = 0) -> None:
    """Write a small untrained Whisper and its processor, as `from_pretrained(folder)` loads them.

    Args:
        folder: where the files go; made if need be.
        texts: what the tokenizer learns its pieces from; any other text is spelled in bytes.
        seed: fixes the weights.
    """
    import torch

    processor = make_processor(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _make_whisper(processor.tokenizer)
    processor.save_pretrained(folder)
    model.save_pretrained(folder)


def make_processor(texts: Iterable[str]) -> WhisperProcessor:
    """A tokenizer that holds each word of the texts as one piece, and log-mel features of 2 s."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    vocab, merges = _learn_pieces(texts)
    tokenizer = WhisperTokenizer(vocab=vocab, merges=merges, pad_token=_END)
    tokenizer.add_special_tokens({"extra_special_tokens": list(_CONTROL)})
    tokenizer.add_tokens([f"<|{step / 50:.2f}|>" for step in range(50 * CHUNK_SECONDS + 1)])
    tokenizer.set_prefix_tokens(language="en", task="transcribe")
    features = WhisperFeatureExtractor(chunk_length=CHUNK_SECONDS)
    return WhisperProcessor(features, tokenizer)


def _learn_pieces(texts: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of byte pairs; few texts become whole words, with and without the space before them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=_MOST_PIECES, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator((form for text in texts for form in (text, f" {text}")), trainer)
    learned = json.loads(learner.to_str())["model"]
    return {**learned["vocab"], _END: len(learned["vocab"])}, [tuple(merge) for merge in learned["merges"]]


def _make_whisper(tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    ids: Any = tokenizer.convert_tokens_to_ids
    end = tokenizer.eos_token_id
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        init_std=0.08,  # about 1/sqrt(d_model); Whisper's 0.02 drowns the sound in the positions and learns slowly
        max_source_positions=50 * CHUNK_SECONDS,
        max_target_positions=64,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=ids("<|startoftranscript|>"),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    generation: Any = model.generation_config
    generation.lang_to_id = {"<|en|>": ids("<|en|>")}
    generation.task_to_id = {task: ids(f"<|{task}|>") for task in ("transcribe", "translate")}
    generation.no_timestamps_token_id = ids("<|notimestamps|>")
    generation.is_multilingual = True
    generation.max_length = config.max_target_positions
    generation._from_model_config = False  # or loading drops the maps above
    return model
