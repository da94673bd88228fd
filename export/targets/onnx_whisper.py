"""Whisper as two ONNX graphs, encoder and decoder with a cache, in the form that sherpa-onnx runs."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common.exportable import Rules, Spoken, greedy
from ..graph import Session, describe, quantise
from ..graph import write as write_graph
from ..source import Source
from .merged import WEIGHTS

needs_whole = True
ENCODER, DECODER, TOKENS = "encoder.onnx", "decoder.onnx", "tokens.txt"
CONTROL = ("startoftranscript", "transcribe", "translate", "startofprev", "startoflm", "notimestamps")
SILENCE = ("<|nospeech|>", "<|nocaptions|>")
"""What the token of no speech is called in different versions."""


class Encoder(nn.Module):
    """Mel features [B, F, T] -> keys and values of the decoder's layers over them, each [layers, B, T / 2, D].

    Any T up to the model's own: a shorter recording uses the first positions.
    """

    def __init__(self, whisper: Any):
        super().__init__()
        self.encoder, self.layers = whisper.model.encoder, whisper.model.decoder.layers

    def forward(self, mel: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values."""
        part = self.encoder
        hidden = nn.functional.gelu(part.conv2(nn.functional.gelu(part.conv1(mel)))).permute(0, 2, 1)
        hidden = hidden + part.embed_positions.weight[: hidden.shape[1]]
        for layer in part.layers:
            hidden = layer(hidden, None)
        hidden = part.layer_norm(hidden)
        keys = [layer.encoder_attn.k_proj(hidden) for layer in self.layers]
        return torch.stack(keys), torch.stack([layer.encoder_attn.v_proj(hidden) for layer in self.layers])


class Decoder(nn.Module):
    """Logits [B, L, V] of tokens [B, L] that follow `offset` others, whose keys and values are in a cache.

    The cache [layers, B, P, D] has room for all P positions and is given back with those of the new tokens.
    """

    def __init__(self, whisper: Any):
        super().__init__()
        self.decoder, self.head = whisper.model.decoder, whisper.proj_out

    def forward(
        self, tokens: Tensor, keys: Tensor, values: Tensor, heard_keys: Tensor, heard_values: Tensor, offset: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, keys, values."""
        part, room = self.decoder, torch.arange(keys.shape[2])
        places = offset + torch.arange(tokens.shape[1])
        hidden = part.embed_tokens(tokens) + part.embed_positions.weight[places]
        mask = torch.where(room[None] <= places[:, None], 0.0, -torch.inf)
        new_keys, new_values = [], []
        for number, layer in enumerate(part.layers):
            own, normed = layer.self_attn, layer.self_attn_layer_norm(hidden)
            new_keys.append(keys[number].index_copy(1, places, own.k_proj(normed)))
            new_values.append(values[number].index_copy(1, places, own.v_proj(normed)))
            hidden = hidden + attend(own, normed, new_keys[-1], new_values[-1], mask)
            normed = layer.encoder_attn_layer_norm(hidden)
            hidden = hidden + attend(layer.encoder_attn, normed, heard_keys[number], heard_values[number])
            hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden))))
        return self.head(part.layer_norm(hidden)), torch.stack(new_keys), torch.stack(new_values)


def attend(layer: Any, hidden: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """What a layer of attention makes of hidden states [B, L, D] over keys and values [B, P, D].

    Args:
        layer: Whisper's attention in transformers.
        hidden: what asks.
        keys, values: what is looked at.
        mask: [L, P], -inf where nothing is to be seen.
    """

    def heads(given: Tensor) -> Tensor:
        split: Tensor = given.unflatten(2, (layer.num_heads, layer.head_dim)).transpose(1, 2)
        return split

    scores = heads(layer.q_proj(hidden) * layer.scaling) @ heads(keys).transpose(2, 3)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    found: Tensor = layer.out_proj((weights @ heads(values)).transpose(1, 2).flatten(2))
    return found


def write(source: Source, directory: Path, dtype: str) -> None:
    """Write both graphs, with tokens, tokenizer and settings beside them."""
    from transformers import WhisperForConditionalGeneration, WhisperTokenizer

    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    whisper = WhisperForConditionalGeneration.from_pretrained(source.merged, **options)
    tokenizer = WhisperTokenizer.from_pretrained(source.merged)
    config = whisper.config
    shutil.copytree(source.merged, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHTS))
    (directory / TOKENS).write_text(listed(tokenizer), encoding="ascii")
    mel = {"mel": torch.zeros(2, config.num_mel_bins, 2 * config.max_source_positions)}
    heard = ["n_layer_cross_k", "n_layer_cross_v"]
    write_graph(Encoder(whisper), mel, heard, {"mel": {0: "n_audio", 2: "T"}}, directory / ENCODER)
    describe(directory / ENCODER, facts(config, whisper.generation_config, tokenizer))
    cache = torch.zeros(config.decoder_layers, 2, config.max_target_positions, config.d_model)
    seen = torch.zeros(config.decoder_layers, 2, 7, config.d_model)
    inputs = {
        "tokens": torch.zeros(2, 3, dtype=torch.long), "in_n_layer_self_k_cache": cache,
        "in_n_layer_self_v_cache": cache, "n_layer_cross_k": seen, "n_layer_cross_v": seen,
        "offset": torch.zeros(1, dtype=torch.long),
    }  # fmt: skip
    axes = {
        "tokens": {0: "n_audio", 1: "n_tokens"},
        "in_n_layer_self_k_cache": {1: "n_audio"}, "in_n_layer_self_v_cache": {1: "n_audio"},
        "n_layer_cross_k": {1: "n_audio", 2: "heard"}, "n_layer_cross_v": {1: "n_audio", 2: "heard"},
    }  # fmt: skip
    outputs = ["logits", "out_n_layer_self_k_cache", "out_n_layer_self_v_cache"]
    write_graph(Decoder(whisper), inputs, outputs, axes, directory / DECODER)
    if dtype == "int8":
        for name in (ENCODER, DECODER):
            quantise(directory / name, ["MatMul", "Gemm"])


def listed(tokenizer: Any) -> str:
    """sherpa-onnx's list: on each line the bytes of a token of text in base64, and its id."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    numbers = {sign: number for number, sign in bytes_to_unicode().items()}
    rows = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    added = tokenizer.added_tokens_decoder
    spelled = [(bytes(numbers[sign] for sign in token), number) for number, token in rows if number not in added]
    return "".join(f"{base64.b64encode(text).decode()} {number}\n" for text, number in spelled)


def facts(config: Any, generation: Any, tokenizer: Any) -> dict[str, object]:
    """What sherpa-onnx reads in the encoder's metadata."""
    control = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in CONTROL}
    silence = [number for number, token in tokenizer.added_tokens_decoder.items() if token.content in SILENCE]
    languages = getattr(generation, "lang_to_id", None) or {}
    start = control["startoftranscript"]
    prompt = [start, next(iter(languages.values())), control["transcribe"]] if languages else [start]
    return {
        "model_type": "whisper", "version": 1, "maintainer": "luthier", "n_mels": config.num_mel_bins,
        "n_audio_ctx": config.max_source_positions, "n_audio_state": config.d_model,
        "n_audio_head": config.encoder_attention_heads, "n_audio_layer": config.encoder_layers,
        "n_vocab": config.vocab_size, "n_text_ctx": config.max_target_positions, "n_text_state": config.d_model,
        "n_text_head": config.decoder_attention_heads, "n_text_layer": config.decoder_layers,
        "sot_sequence": ",".join(map(str, prompt)), "all_language_tokens": ",".join(map(str, languages.values())),
        "all_language_codes": ",".join(name.strip("<|>") for name in languages), "sot": start, "sot_index": 0,
        "eot": config.eos_token_id, "blank_id": tokenizer.encode(" ", add_special_tokens=False)[0],
        "is_multilingual": int(bool(languages)), "no_speech": silence[0] if silence else 0,
        "non_speech_tokens": ",".join(map(str, generation.suppress_tokens or ())), "transcribe": control["transcribe"],
        "translate": control["translate"], "sot_prev": control["startofprev"], "sot_lm": control["startoflm"],
        "no_timestamps": control["notimestamps"],
    }  # fmt: skip


class Runner:
    """Both graphs in onnxruntime."""

    def __init__(self, directory: Path, sizes: Sequence[int], end: int):
        self.encoder, self.decoder = Session(directory / ENCODER), Session(directory / DECODER)
        self.sizes, self.end = tuple(sizes), end

    def transcribe(
        self, features: np.ndarray, prompts: Sequence[Sequence[int]], most: int, rules: Rules
    ) -> list[Spoken]:
        """The most probable transcripts of mel features [B, F, T], each after its decoder prompt."""
        rows = range(len(prompts))
        return [self._one(features[row : row + 1], prompts[row], most, rules) for row in rows]

    def _one(self, features: np.ndarray, prompt: Sequence[int], most: int, rules: Rules) -> Spoken:
        heard = self.encoder({"mel": features})
        state = {name: np.zeros(self.sizes, np.float32) for name in ("k", "v")}
        done = 0

        def step(new: list[int]) -> np.ndarray:
            nonlocal done
            given = {f"in_n_layer_self_{name}_cache": value for name, value in state.items()}
            given |= {"tokens": np.array([new]), "offset": np.array([done])}
            found = self.decoder(heard | given)
            state.update({name: found[f"out_n_layer_self_{name}_cache"] for name in state})
            done += len(new)
            logits: np.ndarray = found["logits"][0, -1]
            return logits

        return greedy(step, prompt, most, [self.end], rules)


def runner(source: Source, directory: Path, dtype: str) -> Runner:
    """The artifact in onnxruntime."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    sizes = (config.decoder_layers, 1, config.max_target_positions, config.d_model)
    return Runner(directory, sizes, config.eos_token_id)
