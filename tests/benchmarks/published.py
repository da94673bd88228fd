"""Models of published sizes, as folders that hold a configuration and no weights, each with data for them.

Tokenizers are the tests' small ones; vocabularies have their published size. With `tiny` the same is made at toy size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from estimate import conftest

LLAMA3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}  # fmt: skip
QWEN3_0_6B = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
QWEN3_1_7B = {**QWEN3_0_6B, "hidden_size": 2048, "intermediate_size": 6144}
WHISPER_LARGE_V3 = {
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "num_hidden_layers": 32, "encoder_ffn_dim": 5120,
    "encoder_attention_heads": 20, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120, "vocab_size": 51866,
    "num_mel_bins": 128, "max_source_positions": 1500, "max_target_positions": 448, "init_std": 0.02,
}  # fmt: skip
SDXL: Mapping[str, dict[str, Any]] = {
    "unet": {
        "sample_size": 128, "block_out_channels": [320, 640, 1280], "layers_per_block": 2, "norm_num_groups": 32,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": [5, 10, 20], "transformer_layers_per_block": [1, 2, 10], "cross_attention_dim": 2048,
        "use_linear_projection": True, "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
    },
    "vae": {
        "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "norm_num_groups": 32, "sample_size": 1024,
        "scaling_factor": 0.13025,
    },
    "text_encoder": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "projection_dim": 768, "vocab_size": 49408,
    },
    "text_encoder_2": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
        "projection_dim": 1280, "vocab_size": 49408, "hidden_act": "gelu",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A training of a published size.

    Args:
        recipe: that it is trained by.
        prepare: makes model and data in a folder, at toy size or at that of the publication, for a number of steps;
            gives the overrides.
        peer: whether transformers' own Trainer is run beside it.
    """

    recipe: str
    prepare: Callable[[Path, bool, int], list[str]]
    peer: bool = False


def language(
    place: Path, tiny: bool, steps: int, family: str, sizes: Mapping[str, Any], rows: int, more: tuple[str, ...]
) -> list[str]:
    """Conversations of nearly 4,096 tokens (tiny: 128), `rows` of them in a batch."""
    makers = conftest("llm")
    makers.save_model(place / "model", family, "tagged")
    resized(place / "model", {} if tiny else sizes)
    length = 128 if tiny else 4096
    made = makers._tokenizer("tagged")
    each = len(made.apply_chat_template(makers.dialogue(1, 40)["messages"], return_dict=False)) / 40
    makers.write_rows(place / "rows.jsonl", [makers.dialogue(1, int(0.98 * length / each))] * (rows * steps))
    return [
        f"data.max_length={length}", f"data.batch.tokens={rows * length}", "data.batch.packing=true", *more,
        "train.precision=bf16-mixed" if "model.lora" not in str(more) else "train.precision=bf16-true",
    ]  # fmt: skip


def whisper(place: Path, tiny: bool, steps: int) -> list[str]:
    """Recordings of 30 seconds (tiny: 2), 16 in a batch (tiny: 2)."""
    import transformers as hf

    own, shared = conftest("asr/whisper"), conftest("asr")
    own.CHUNK_SECONDS = seconds = 2 if tiny else 30
    own.save_whisper(place / "model", own.make_tokenizer(("en",)), True, ("en",))
    resized(place / "model", {} if tiny else WHISPER_LARGE_V3)
    mels = 80 if tiny else 128
    hf.WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds).save_pretrained(place / "model")
    batch = 2 if tiny else 16
    waves = [shared.make_tone(at % 8, seconds) for at in range(batch)]
    file = shared.make_manifest(place, waves, [{"text": "one two three", "language": "en"}] * batch, "PCM_16")
    file.write_text(file.read_text(encoding="utf-8") * steps, encoding="utf-8")
    return [f"data.batch.examples={batch}", "model.audio_context=full", "train.precision=bf16-mixed"]


def pictures(place: Path, tiny: bool, steps: int) -> list[str]:
    """Two batches of 4 pictures of 1024 x 1024 pixels (tiny: 32 x 32): from the third step on all are in the cache."""
    makers = conftest("diffusion")
    makers.sdxl().save_pretrained(place / "model")
    for part in SDXL:
        resized(place / "model" / part, {} if tiny else SDXL[part])
    side, rows = 32 if tiny else 1024, []
    for number in range(8):
        makers.painted(number, side, side).save(place / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": makers.CAPTIONS[number % 8]})
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    toy = ["data.image.step=4", "data.image.min_side=4"] if tiny else []
    return [
        f"data.image.resolution={side}", f"data.cache.folder={place / 'cache'}", "data.batch.examples=4", *toy,
        "train.precision=bf16-mixed",
    ]  # fmt: skip


def resized(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Give the configuration of a saved model other sizes, and leave its weights out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), **sizes}
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()


LORA = ("train.gradient_checkpointing=true", "model.lora={rank: 16, alpha: 32, target_modules: all-linear}")
KEPT, DROPPED = ("train.gradient_checkpointing=false",), ("train.gradient_checkpointing=true",)
CASES = {
    "gpu_qwen3_0.6b": Case(
        "llm/sft", partial(language, family="qwen3", sizes=QWEN3_0_6B, rows=2, more=KEPT), peer=True
    ),
    "gpu_llama3_8b_lora": Case(
        "llm/sft", partial(language, family="llama", sizes=LLAMA3_8B, rows=2, more=LORA), peer=True
    ),
    "gpu_whisper_large_v3_lora": Case("asr/whisper-lora", whisper),
    "gpu_sdxl_lora": Case("diffusion/sdxl-lora", pictures),
    "gpu_qwen3_1.7b": Case("llm/sft", partial(language, family="qwen3", sizes=QWEN3_1_7B, rows=2, more=DROPPED)),
}
"""In the order in which they are run: what comes last is left out first where time is short."""
