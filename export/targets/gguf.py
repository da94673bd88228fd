"""Language models of the Llama and Qwen families for llama.cpp, as one GGUF file.

The names and the order of the rotary halves are those of llama.cpp's own converter, which is no package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.errors import ExportError
from ..source import Source

needs_whole = True
FILE = "model.gguf"
KEPT = ("generation_config.json", "chat_template.jinja")
BLOCK = 32
"""Numbers that share a scale."""
WHOLE = ("token_embd.weight", "output.weight")
"""What 4 bits would harm most: the tables of tokens, which take 8 then."""
ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""Name of the family in transformers, and in the package gguf."""

QWEN2 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""  # noqa: E501
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPLITS = {QWEN2: "qwen2", LLAMA3: "llama-bpe"}
"""How a tokenizer parts a text before it merges, by llama.cpp's name."""


def write(source: Source, directory: Path, dtype: str) -> None:
    """Write the file; matrices in `dtype`, vectors in float32.

    Raises:
        ExportError: another family, or a tokenizer or positions that are not known here.
    """
    from gguf import GGUFWriter
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(source.merged)
    if config.model_type not in ARCHITECTURES:
        raise ExportError("no GGUF for this family", given=config.model_type, expected=", ".join(ARCHITECTURES))
    writer = GGUFWriter(str(directory / FILE), config.model_type)
    _say_sizes(writer, config, dtype)
    _say_tokens(writer, AutoTokenizer.from_pretrained(source.merged), config)
    for name, tensor in _tensors(source.merged, config):
        values, kind = _numbers(name, tensor, dtype)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in KEPT:
        if (source.merged / name).is_file():
            shutil.copy(source.merged / name, directory / name)


def _say_sizes(writer: Any, config: Any, dtype: str) -> None:
    from gguf import LlamaFileType

    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or getattr(config, "use_sliding_window", False):
        raise ExportError("stretched positions and sliding windows are not written yet", given=rope.get("rope_type"))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = {
        "float16": LlamaFileType.MOSTLY_F16, "float32": LlamaFileType.ALL_F32,
        "q8_0": LlamaFileType.MOSTLY_Q8_0, "q4_0": LlamaFileType.MOSTLY_Q4_0,
    }  # fmt: skip
    writer.add_name("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(kinds[dtype])


def _say_tokens(writer: Any, tokenizer: Any, config: Any) -> None:
    """The vocabulary, merges, special tokens and chat template."""
    from gguf import TokenType

    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    tokens = [f"[PAD{number}]" for number in range(config.vocab_size)]
    kinds = [TokenType.UNUSED] * len(tokens)
    for token, number in vocabulary.items():
        special = added[number].special if number in added else None
        tokens[number] = token
        kinds[number] = {None: TokenType.NORMAL, True: TokenType.CONTROL, False: TokenType.USER_DEFINED}[special]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_of(whole))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in whole["model"]["merges"]])
    for name in ("bos", "eos", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(
        tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    )
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def split_of(whole: dict[str, Any]) -> str:
    """llama.cpp's name of how a tokenizer parts a text, from its `tokenizer.json`.

    Raises:
        ExportError: it is no byte-level BPE, or parts in a way that is not known here.
    """
    steps = whole.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    bytes_of = [step for step in steps if step.get("type") == "ByteLevel"]
    if whole["model"]["type"] == "BPE" and bytes_of and not bytes_of[0].get("add_prefix_space"):
        if not patterns and bytes_of[0].get("use_regex", True):
            return "gpt-2"
        if len(patterns) == 1 and patterns[0] in SPLITS:
            return SPLITS[patterns[0]]
    raise ExportError(
        "llama.cpp would read other tokens: this tokenizer parts texts in a way that is not known here",
        given=patterns or whole["model"]["type"],
        expected="byte-level BPE that parts texts as GPT-2, Llama 3 or Qwen 2 do",
    )


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    from gguf import MODEL_ARCH, get_tensor_name_map
    from safetensors import safe_open

    names = get_tensor_name_map(getattr(MODEL_ARCH, ARCHITECTURES[config.model_type]), config.num_hidden_layers)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as read:
            for name in read.keys():  # noqa: SIM118 - not a mapping
                found = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if found is None:
                    raise ExportError("llama.cpp has no such tensor", given=name)
                tensor = read.get_tensor(name)
                yield found, _turned(tensor, name, config) if config.model_type == "llama" else tensor


def _turned(tensor: Tensor, name: str, config: Any) -> Tensor:
    """Llama's queries and keys with the two numbers of a rotation side by side; transformers has them in halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    number = next((count for part, count in heads.items() if f".{part}." in name), None)
    if number is None:
        return tensor
    parted = tensor.reshape(number, 2, tensor.shape[0] // number // 2, *tensor.shape[1:])
    return parted.swapaxes(1, 2).reshape(tensor.shape)


def _numbers(name: str, tensor: Tensor, dtype: str) -> tuple[np.ndarray, Any]:
    """A tensor's numbers as they are written; `name` is llama.cpp's."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import quants

    values = tensor.to(torch.float32).numpy()
    if tensor.dim() < 2 or dtype == "float32":
        return values, Kind.F32
    kinds = {"q8_0": Kind.Q8_0, "q4_0": Kind.Q8_0 if name in WHOLE else Kind.Q4_0}
    kind = kinds.get(dtype, Kind.F16) if values.shape[-1] % BLOCK == 0 else Kind.F16
    return quants.quantize(values, kind), kind


def runner(source: Source, directory: Path, dtype: str) -> Any:
    """The file, read back by transformers' own reader and computed in float32, as llama.cpp is no package here."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=FILE, dtype=torch.float32)
    return source.exportable.runner_of(model)
