"""Whisper's network: loading it, adapting it, and running its encoder over as much audio as there is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....common.adapters import adapted
from ....common.errors import unreadable_model
from .config import Config

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

FRAMES_PER_POSITION = 2
"""Mel frames for each encoder position (the stride of the second convolution)."""

FAMILY = "a Whisper model"


def load_processor(path: str) -> WhisperProcessor:
    """Tokenizer and feature extractor of a Whisper directory."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    first = Path(path).parts[0] if Path(path).parts else ""
    if not Path(path).is_dir() and (Path(path).is_absolute() or len(Path(path).parts) != 2 or Path(first).exists()):
        raise unreadable_model(path, FileNotFoundError("no such directory"), FAMILY)  # not the form of a hub name
    try:
        extractor = WhisperFeatureExtractor.from_pretrained(path)
        tokenizer = WhisperTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    return WhisperProcessor(extractor, tokenizer)


def load_generation_config(path: str) -> Any:
    """The generation config of a Whisper directory, with its language ids kept over further saves."""
    from transformers import AutoConfig, GenerationConfig

    try:
        # A model that was built in code is marked so; from_pretrained then drops lang_to_id and task_to_id.
        config: Any = GenerationConfig.from_pretrained(path, _from_model_config=False)
    except OSError:
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    config._from_model_config = False
    config.forced_decoder_ids = None  # of old checkpoints; language and task say it
    return config


def load_model(recipe: Config, weights: Path | None) -> tuple[nn.Module, WhisperForConditionalGeneration]:
    """(what is trained, the Whisper inside): the model itself, or a PEFT model around it.

    Args:
        recipe: path, adapter, precision.
        weights: directory of a saved model or adapter to load instead of starting from `model.path`.
    """
    from transformers import WhisperForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a few seconds at most, and one more for every checkpoint
    section = recipe.model
    path = section.path if weights is None or section.lora else str(weights)
    dtype = torch.bfloat16 if recipe.train.precision == "bf16-true" else torch.float32
    try:
        whisper = WhisperForConditionalGeneration.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise unreadable_model(path, error, FAMILY) from error
    whisper.generation_config = load_generation_config(path)
    model: nn.Module = whisper
    if section.lora is not None:  # PEFT's sequence-to-sequence type calls the model with input_ids: no task type
        frozen = r"model\.encoder\..*" if section.freeze_encoder else None
        model = adapted(whisper, section.lora, weights, exclude_modules=frozen)
    if section.freeze_encoder:
        whisper.model.encoder.requires_grad_(False)
    if recipe.train.gradient_checkpointing:
        enable = getattr(whisper, "activation_checkpointing_enable", whisper.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model, whisper


def encode(whisper: WhisperForConditionalGeneration, features: Tensor, real: int | None = None) -> Tensor:
    """The encoder's output [B, T / 2, D] for mel features [B, F, T] of any even length up to the model's own.

    Same as transformers' WhisperEncoder at the full length, which accepts no other; a shorter input uses the first
    positions, as if the recording ended there.

    Args:
        whisper: the model.
        features: mel features.
        real: frames after which each row is constant (padding); None: not known.
    """
    encoder = whisper.model.encoder
    hidden = _convolve(encoder, features.to(encoder.conv1.weight.dtype), real)
    hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
    hidden = nn.functional.dropout(hidden, p=encoder.dropout, training=encoder.training)
    for layer in encoder.layers:
        if encoder.training and encoder.layerdrop > 0.0 and torch.rand([]) < encoder.layerdrop:
            continue
        hidden = layer(hidden, None)
    normed: Tensor = encoder.layer_norm(hidden)
    return normed


_BORDER = 8
"""Frames around a change within which the two convolutions see both sides of it, rounded up."""


def _convolve(encoder: Any, features: Tensor, real: int | None) -> Tensor:
    """The two convolutions [B, F, T] -> [B, T / 2, D]. Over constant padding they give one constant column, which is
    computed once and repeated, as are the columns at the right edge, where the convolutions' own padding is seen."""

    def convolve(part: Tensor) -> Tensor:
        hidden = nn.functional.gelu(encoder.conv1(part))
        return nn.functional.gelu(encoder.conv2(hidden)).permute(0, 2, 1)

    positions = features.shape[2] // FRAMES_PER_POSITION
    seen = positions if real is None else (real + 1) // FRAMES_PER_POSITION + _BORDER
    if seen + _BORDER >= positions:
        return convolve(features)
    head = convolve(features[:, :, : FRAMES_PER_POSITION * seen])[:, :-2]
    tail = convolve(features[:, :, -FRAMES_PER_POSITION * _BORDER :])[:, -2:]
    same = head[:, -1:].expand(-1, positions - head.shape[1] - tail.shape[1], -1)
    return torch.cat([head, same, tail], dim=1)


def decode(whisper: WhisperForConditionalGeneration, ids: Tensor, encoded: Tensor) -> Tensor:
    """The decoder's last hidden states [B, L, D] for its input [B, L] and the encoder's output [B, T, D].

    Where the token table is also the output layer, its gradient is a dense matrix plus a few rows: handing the rows
    over as a sparse gradient saves filling and adding a second matrix of the vocabulary's size.
    """
    decoder, table = whisper.model.decoder, whisper.model.decoder.embed_tokens
    if type(table) is nn.Embedding and table.weight is whisper.proj_out.weight and table.weight.requires_grad:
        embedded = nn.functional.embedding(ids, table.weight, table.padding_idx, sparse=True)
        out = decoder(inputs_embeds=embedded, encoder_hidden_states=encoded, use_cache=False)
    else:
        out = decoder(input_ids=ids, encoder_hidden_states=encoded, use_cache=False)
    hidden: Tensor = out.last_hidden_state
    return hidden
